"""From a job, its pods, events and Kueue workload to one sentence that says where it stands and why. Pure."""

from __future__ import annotations

import re
from typing import Any

from jobs.manifest import get, mappings
from jobs.status import Part, State, Status
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE

Object = dict[str, Any]
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


def condition(item: Object, kind: str) -> Object | None:
    """The condition of that type whose status is True: conditions linger with status False."""
    found = [
        c for c in mappings(get(item, "status", "conditions")) if c.get("type") == kind and c.get("status") == "True"
    ]
    return found[0] if found else None


def explain(
    job: Object, pods: list[Object], events: list[Object], workload: Object | None, hosts: list[str], ranks: int,
    elastic: bool,
) -> Status:  # fmt: skip
    """The status of a PyTorchJob or TrainJob.

    Args:
        hosts: host names of the job's pods in the order of their ranks.
        ranks: ranks a pod.
        elastic: rank → pod is decided at run time, so parts carry no ranks.
    """
    places = {host: node for node, host in enumerate(hosts)} if not elastic else {}
    parts = [_part(pod, ranks, places) for pod in pods]
    parts.sort(key=lambda part: (part.ranks or [1 << 30], part.name))
    state, reason, code = _judge(job, pods, events, workload, len(hosts))
    return Status(state, reason, parts, code)


def host(pod: Object) -> str:
    """The name under which the pod's launcher joins the others."""
    return str(get(pod, "spec", "hostname") or get(pod, "metadata", "name"))


def brief(job: Object) -> State:
    """The state from the job's own conditions, without a look at its pods."""
    if condition(job, "Succeeded") or condition(job, "Complete"):
        return "succeeded"
    failed = condition(job, "Failed")
    if failed:
        return _failure(failed, [])[0]
    if condition(job, "Suspended"):
        return "queued"
    if condition(job, "Restarting"):
        return "restarting"
    active = sum(int(item.get("active") or 0) for item in mappings(get(job, "status", "jobsStatus")))
    return "running" if condition(job, "Running") or active else "pending"


def _judge(
    job: Object, pods: list[Object], events: list[Object], workload: Object | None, nodes: int
) -> tuple[State, str, int | None]:
    if condition(job, "Succeeded") or condition(job, "Complete"):
        return "succeeded", "", EXIT_DONE
    failed = condition(job, "Failed")
    if failed:
        return _failure(failed, pods)
    if get(job, "metadata", "deletionTimestamp"):
        return "running", "is being cancelled", None
    suspended = (
        condition(job, "Suspended") is not None
        or get(job, "spec", "suspend")
        or get(job, "spec", "runPolicy", "suspend")
    )
    if workload is not None and not condition(workload, "Admitted"):
        return "queued", _queue(workload), None
    if suspended:
        return "queued", "suspended: it waits for someone to resume it", None
    stuck = next((why for pod in pods if (why := _waiting(pod))), None)
    if stuck:
        return "pending", stuck, None
    pending = [pod for pod in pods if get(pod, "status", "phase") == "Pending"]
    for pod in pending:
        unscheduled = _unscheduled(pod, events)
        if unscheduled:
            ready = len(pods) - len(pending)
            return "unschedulable", f"{ready}/{nodes} pods are placed: {unscheduled}", None
    if condition(job, "Restarting"):
        return "restarting", str(condition(job, "Restarting").get("message", "")), None  # type: ignore[union-attr]
    running = [pod for pod in pods if get(pod, "status", "phase") == "Running"]
    if running and not pending and len(running) >= nodes:
        return "running", f"{len(running)}/{nodes} pods run", None
    if pods:
        return (
            "pending",
            _starting(pending, events) or f"{len(running)}/{nodes} pods run, the others are starting",
            None,
        )
    warning = _last_warning(events)
    return "pending", warning or "no pods yet: is the operator running? (`lockstep doctor k8s`)", None


def _failure(failed: Object, pods: list[Object]) -> tuple[State, str, int]:
    message = str(failed.get("message", ""))
    if "deadline" in message.lower() or failed.get("reason") == "DeadlineExceeded":
        return "timed_out", "the time limit is over", 124
    ends = [(pod, end) for pod in pods if (end := _terminated(pod)) is not None and end.get("exitCode") != 0]
    for pod, end in sorted(ends, key=lambda pair: str(pair[1].get("finishedAt", ""))):
        name, code = get(pod, "metadata", "name"), int(end.get("exitCode", 1))
        if end.get("reason") == "OOMKilled":
            return (
                "failed",
                f"{name} was killed for memory (OOMKilled): raise memory, or lower the batch size",
                EXIT_FAILED,
            )
        if code == EXIT_USAGE:
            return "failed", f"{name}: wrong usage, config or data (exit code 2): see `lockstep logs`", EXIT_USAGE
        if code == 128 + 15:
            return "preempted", f"{name} was told to end and has saved; submit it again to go on", EXIT_PREEMPTED
        return "failed", f"{name} ended with exit code {code}: see `lockstep logs`", EXIT_FAILED
    evicted = next((pod for pod in pods if get(pod, "status", "reason") == "Evicted"), None)
    if evicted:
        return (
            "failed",
            f"{get(evicted, 'metadata', 'name')} was evicted: {get(evicted, 'status', 'message')}",
            EXIT_FAILED,
        )
    if "backoff limit" in message:
        return "failed", "all restarts are used up", EXIT_FAILED
    return "failed", message, EXIT_FAILED


def _part(pod: Object, ranks: int, places: dict[str, int]) -> Part:
    node = places.get(host(pod))
    owned = [] if node is None else list(range(node * ranks, (node + 1) * ranks))
    statuses = mappings(get(pod, "status", "containerStatuses"))
    end = _terminated(pod)
    reason = _waiting(pod) or (f"exit code {end.get('exitCode')}" if end else "")
    return Part(
        str(get(pod, "metadata", "name")), owned, str(get(pod, "status", "phase") or "Unknown").lower(), reason,
        sum(int(item.get("restartCount") or 0) for item in statuses),
    )  # fmt: skip


def _terminated(pod: Object) -> Object | None:
    ends = [get(item, "state", "terminated") for item in mappings(get(pod, "status", "containerStatuses"))]
    return next((end for end in ends if isinstance(end, dict)), None)


def _waiting(pod: Object) -> str:
    """Why a container of the pod cannot start, where waiting alone does not help."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for item in mappings(get(pod, "status", key)):
            waiting = get(item, "state", "waiting") or {}
            reason, message = waiting.get("reason"), str(waiting.get("message") or "")
            name = get(pod, "metadata", "name")
            if reason in _PULL:
                return f"image pull failed: {item.get('image') or ''} on {name}: {message or reason}"
            if reason in _CONFIG:
                return f"{name} cannot start: {message or reason}"
            if reason == "CrashLoopBackOff":
                return f"{name} crashes again and again (CrashLoopBackOff): see `lockstep logs`"
    return ""


def _unscheduled(pod: Object, events: list[Object]) -> str:
    found = [c for c in mappings(get(pod, "status", "conditions")) if c.get("type") == "PodScheduled"]
    if found and found[0].get("status") == "False" and found[0].get("reason") in ("Unschedulable", "SchedulerError"):
        return str(found[0].get("message") or _event_of(pod, events, "FailedScheduling"))
    if not get(pod, "spec", "nodeName"):
        return _event_of(pod, events, "FailedScheduling")
    return ""


def _starting(pending: list[Object], events: list[Object]) -> str:
    """What holds a placed pod up: a volume, most often."""
    for pod in pending:
        for reason in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
            message = _event_of(pod, events, reason)
            if message:
                return f"{get(pod, 'metadata', 'name')}: {message}"
    return ""


def _event_of(pod: Object, events: list[Object], reason: str) -> str:
    name = get(pod, "metadata", "name")
    found = [e for e in events if e.get("reason") == reason and get(e, "involvedObject", "name") == name]
    return str(found[-1].get("message", "")) if found else ""


def _last_warning(events: list[Object]) -> str:
    found = [event for event in events if event.get("type") == "Warning"]
    return str(found[-1].get("message", "")) if found else ""


def _queue(workload: Object) -> str:
    queue = get(workload, "spec", "queueName") or "?"
    for kind in ("Evicted", "Preempted"):
        found = condition(workload, kind)
        if found:
            return f"waiting in queue {queue} after {kind.lower()[:-2]}ion: {found.get('message', '')}"
    pending = [c for c in mappings(get(workload, "status", "conditions")) if c.get("type") == "QuotaReserved"]
    message = re.sub(r"\s+", " ", str(pending[0].get("message", ""))) if pending else ""
    return f"waiting for quota in queue {queue}{f': {message}' if message else ''}"
