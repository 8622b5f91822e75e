"""From a job, its pods, events and Kueue workload to one sentence that says where it stands and why. Pure."""

from __future__ import annotations

import datetime
import re
from typing import Any

from lockstep.jobs.manifest import get, mappings
from lockstep.jobs.status import Part, State, Status
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT, EXIT_USAGE

Object = dict[str, Any]
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
CONTAINERS = ("pytorch", "node")
GONE_SECONDS = 60.0
"""How long after its grace a pod that is being deleted may stay: longer, and nobody on its node sees to it."""
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


def condition(item: Object, kind: str) -> Object | None:
    """The condition of that type whose status is True: conditions linger with status False."""
    found = [
        c for c in mappings(get(item, "status", "conditions")) if c.get("type") == kind and c.get("status") == "True"
    ]
    return found[0] if found else None


def explain(
    job: Object, pods: list[Object], events: list[Object], workload: Object | None, hosts: list[str], ranks: int,
    elastic: bool, now: float, maker: Object | None = None,
) -> Status:  # fmt: skip
    """The status of a PyTorchJob or TrainJob.

    Args:
        hosts: host names of the job's pods in the order of their ranks.
        ranks: ranks a pod.
        elastic: rank → pod is decided at run time, so parts carry no ranks.
        now: seconds since the epoch.
        maker: the batch Job that makes a TrainJob's pods, and has the events of those that are refused.
    """
    places = {host: node for node, host in enumerate(hosts)} if not elastic else {}
    pods = newest(pods)
    known = {None, *(get(item, "metadata", "uid") for item in [job, *pods, maker])}
    # An earlier one of the same name leaves its events for an hour.
    events = [event for event in events if get(event, "involvedObject", "uid") in known]
    parts = [_part(pod, ranks, places, now) for pod in pods]
    parts.sort(key=lambda part: (part.ranks or [1 << 30], part.name))
    state, reason, code = _judge(job, pods, events, workload, len(hosts), now, maker)
    return Status(state, reason, parts, code)


def newest(pods: list[Object]) -> list[Object]:
    """Of several pods of one host the latest: a batch Job keeps the failed ones beside those that replace them."""
    found: dict[str, Object] = {}
    for pod in sorted(pods, key=lambda pod: str(get(pod, "metadata", "creationTimestamp"))):
        found[host(pod)] = pod
    return list(found.values())


def slim(pod: Object) -> Object:
    """What is looked at here of a pod. The whole one takes 50 kB of memory, and a job may have 10,000."""
    meta, spec = get(pod, "metadata") or {}, get(pod, "spec") or {}
    return {
        "metadata": {name: meta[name] for name in _OF_METADATA if name in meta},
        "spec": {name: spec[name] for name in ("hostname", "nodeName") if name in spec},
        "status": get(pod, "status") or {},
    }


_OF_METADATA = ("name", "uid", "labels", "creationTimestamp", "deletionTimestamp")


def host(pod: Object) -> str:
    """The name under which the pod's launcher joins the others."""
    return str(get(pod, "spec", "hostname") or get(pod, "metadata", "name"))


def hosts(job: Object) -> list[str]:
    """Host names of a job's pods in the order of ranks: the rendezvous sorts its nodes by their names, as text."""
    name = get(job, "metadata", "name")
    if job.get("kind") == "TrainJob":
        count = get(job, "spec", "trainer", "numNodes") or 1
        return sorted(f"{name}-node-0-{index}" for index in range(count))
    replicas = get(job, "spec", "pytorchReplicaSpecs") or {}
    counts = {kind: get(replica, "replicas") or 1 for kind, replica in replicas.items()}
    return sorted(f"{name}-{kind.lower()}-{index}" for kind, count in counts.items() for index in range(count))


def container_of(job: Object) -> str:
    """The container that the ranks run in."""
    return CONTAINERS[1] if job.get("kind") == "TrainJob" else CONTAINERS[0]


def brief(job: Object) -> State:
    """The state from the job's own conditions, without a look at its pods."""
    if condition(job, "Succeeded") or condition(job, "Complete"):
        return "succeeded"
    failed = condition(job, "Failed")
    if failed:
        return _failure(job, failed, [])[0]
    if condition(job, "Suspended"):
        return "queued"
    if condition(job, "Restarting"):
        return "restarting"
    active = sum(int(item.get("active") or 0) for item in mappings(get(job, "status", "jobsStatus")))
    return "running" if condition(job, "Running") or active else "pending"


def _judge(
    job: Object, pods: list[Object], events: list[Object], workload: Object | None, nodes: int, now: float,
    maker: Object | None,
) -> tuple[State, str, int | None]:  # fmt: skip
    if condition(job, "Succeeded") or condition(job, "Complete"):
        return "succeeded", "", EXIT_DONE
    failed = condition(job, "Failed")
    if failed:
        return _failure(job, failed, pods)
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
    silent = next((why for pod in pods if (why := _silent(pod, now))), None)
    if silent:
        return "running", silent, None
    stuck = next((why for pod in pods if (why := _waiting(pod))), None)
    if stuck:
        return "pending", stuck, None
    broken = next((end for pod in pods if (end := _broken(pod))), None)
    if broken:  # for seconds to minutes, until the operator replaces the pod or says that the job has failed
        return "restarting", broken[0], None
    pending = [pod for pod in pods if get(pod, "status", "phase") == "Pending"]
    for pod in pending:
        unscheduled = _unscheduled(pod, events)
        if unscheduled:
            placed = sum(map(_placed, pods))
            return "unschedulable", f"{placed}/{nodes} pods are placed: {unscheduled}", None
    if condition(job, "Restarting"):
        return "restarting", str(get(condition(job, "Restarting"), "message") or ""), None
    running = [pod for pod in pods if get(pod, "status", "phase") == "Running"]
    if running and not pending and len(running) >= nodes:
        return "running", f"{len(running)}/{nodes} pods run", None
    refused = _refused(maker or job, pods, events) if len(pods) < nodes else ""
    if pods:
        others = f"the others are refused: {refused}" if refused else "the others are starting"
        return "pending", _starting(pending, events) or f"{len(running)}/{nodes} pods run, {others}", None
    warning = refused or _last_warning(events)
    return "pending", warning or "no pods yet: is the operator running? (`lockstep doctor k8s`)", None


_SAYS = re.compile(r"(?:Py)?\w*[Jj]ob (?P<name>\S+) has failed because (?P<why>.*)", re.S)
"""How the operator puts it; the job's name may hold any word."""


def _failure(job: Object, failed: Object, pods: list[Object]) -> tuple[State, str, int]:
    message = str(failed.get("message") or "")
    said = _SAYS.fullmatch(message)
    why = said["why"] if said is not None and said["name"] == get(job, "metadata", "name") else ""
    if failed.get("reason") == "DeadlineExceeded" or "longer than specified deadline" in why:
        return "timed_out", "the time limit is over", EXIT_TIMED_OUT
    ends = [(pod, broken) for pod in pods if (broken := _broken(pod)) is not None]
    for pod, (text, code) in sorted(ends, key=lambda pair: str(get(_terminated(pair[0]), "finishedAt") or "~")):
        if code == EXIT_USAGE:
            name = get(pod, "metadata", "name")
            return "failed", f"{name}: wrong usage, config or data (exit code 2): see `lockstep logs`", EXIT_USAGE
        if code == 128 + 15:
            name = get(pod, "metadata", "name")
            return "preempted", f"{name} was told to end and has saved; submit it again to resume", EXIT_PREEMPTED
        return "failed", text, EXIT_FAILED
    if failed.get("reason") == "BackoffLimitExceeded" or "specified backoff limit" in why:
        return "failed", "all restarts are used up", EXIT_FAILED
    return "failed", message, EXIT_FAILED


def _broken(pod: Object) -> tuple[str, int | None] | None:
    """How the pod failed, and its exit code: an eviction or a lack of memory tells more than a code."""
    name = get(pod, "metadata", "name")
    end = _terminated(pod)
    code = (1 if end.get("exitCode") is None else int(end["exitCode"])) if end is not None else 0
    if get(pod, "status", "reason") == "Evicted":
        return f"{name} was evicted: {get(pod, 'status', 'message')}", code if code == 128 + 15 else None
    if end is not None and code and end.get("reason") == "OOMKilled":
        return f"{name} was killed for memory (OOMKilled): raise memory, or lower the batch size", None
    if end is not None and code:
        where = f" in {end['container']}" if end["init"] else ""
        return f"{name} ended with exit code {code}{where}: see `lockstep logs`", code
    if get(pod, "status", "phase") == "Failed":
        return (
            f"{name} failed: {get(pod, 'status', 'message') or get(pod, 'status', 'reason') or 'no reason given'}",
            None,
        )
    return None


def _silent(pod: Object, now: float) -> str:
    """That the pod's node does not answer. A dead node's pods keep the phase Running, and are Terminating for ever."""
    name, node = get(pod, "metadata", "name"), get(pod, "spec", "nodeName")
    silent = f"the node {node} of {name} does not answer" if node else f"the node of {name} does not answer"
    conditions = mappings(get(pod, "status", "conditions"))
    ready = [c for c in conditions if c.get("type") == "Ready"]
    if get(pod, "status", "phase") == "Running" and ready and ready[0].get("status") != "True":
        # A kubelet gives its reasons. Who speaks for a dead node gives this one, or none and leaves the containers ready.
        said = ready[0].get("reason")
        inside = [c.get("status") for c in conditions if c.get("type") == "ContainersReady"]
        if said in ("NodeNotReady", "NodeLost") or (not said and inside == ["True"]):
            return silent
    if get(pod, "status", "phase") == "Unknown":
        return silent
    until = _seconds(get(pod, "metadata", "deletionTimestamp"))  # its grace is part of it
    if until is not None and now > until + GONE_SECONDS:
        return f"{silent}: the pod should have ended long ago"
    return ""


def _seconds(stamp: Any) -> float | None:
    """RFC 3339 as seconds since the epoch."""
    try:
        return datetime.datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def _placed(pod: Object) -> bool:
    conditions = mappings(get(pod, "status", "conditions"))
    return bool(get(pod, "spec", "nodeName")) or any(
        c.get("type") == "PodScheduled" and c.get("status") == "True" for c in conditions
    )


def _part(pod: Object, ranks: int, places: dict[str, int], now: float) -> Part:
    node = places.get(host(pod))
    owned = [] if node is None else list(range(node * ranks, (node + 1) * ranks))
    statuses = mappings(get(pod, "status", "containerStatuses"))
    end, silent = _terminated(pod), _silent(pod, now)
    reason = silent or _waiting(pod) or (f"exit code {end.get('exitCode')}" if end else "")
    state = "unknown" if silent else str(get(pod, "status", "phase") or "Unknown").lower()
    restarts = sum(int(item.get("restartCount") or 0) for item in statuses)
    return Part(str(get(pod, "metadata", "name")), owned, state, reason, restarts)


def _terminated(pod: Object) -> Object | None:
    """How the pod's own container ended, or an init container that failed, with its name. Sidecars do not count."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for item in mappings(get(pod, "status", key)):
            end, init = get(item, "state", "terminated"), key == "initContainerStatuses"
            ours = item.get("name") in CONTAINERS or (init and get(end, "exitCode") != 0)
            if isinstance(end, dict) and ours:
                return {**end, "container": item.get("name"), "init": init}
    return None


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
                last = get(item, "lastState", "terminated") or {}
                if last.get("reason") == "OOMKilled":
                    return f"{name} is killed for memory again and again (OOMKilled): raise memory, or lower the batch size"
                code = f", exit code {last['exitCode']}" if "exitCode" in last else ""
                return f"{name} crashes again and again (CrashLoopBackOff{code}): see `lockstep logs`"
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
    return str(found[-1].get("message") or "") if found else ""


def _refused(maker: Object, pods: list[Object], events: list[Object]) -> str:
    """What the cluster says to pods that it does not let in: quota, PodSecurity, LimitRange. The job has no such condition."""
    name = get(maker, "metadata", "name")
    latest = max((str(get(pod, "metadata", "creationTimestamp")) for pod in pods), default="")
    found = [
        event
        for event in events
        if str(event.get("reason")).startswith("FailedCreate")
        and get(event, "involvedObject", "name") == name
        and str(event.get("lastTimestamp") or event.get("eventTime") or "~") >= latest  # else it was let in since
    ]
    return str(found[-1].get("message") or "").removeprefix("Error creating: ") if found else ""


def _last_warning(events: list[Object]) -> str:
    found = [event for event in events if event.get("type") == "Warning"]
    return str(found[-1].get("message") or "") if found else ""


def _queue(workload: Object) -> str:
    queue = get(workload, "spec", "queueName") or "?"
    for kind in ("Evicted", "Preempted"):
        found = condition(workload, kind)
        if found:
            return f"waiting in queue {queue} after {kind.lower()[:-2]}ion: {found.get('message') or ''}"
    pending = [c for c in mappings(get(workload, "status", "conditions")) if c.get("type") == "QuotaReserved"]
    message = re.sub(r"\s+", " ", str(pending[0].get("message") or "")) if pending else ""
    return f"waiting for quota in queue {queue}{f': {message}' if message else ''}"
