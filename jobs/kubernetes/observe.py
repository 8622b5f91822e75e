"""Turns a job, its pods, events and Kueue workload into one sentence on its state and the reason; a refusal into advice. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT, EXIT_USAGE, UserError

from ..manifest import get, mappings, seconds_of
from ..status import NodeStatus, State, Status, Unreachable
from .render import CONTAINERS, KINDS, KUEUE_QUEUE

Object = dict[str, Any]
INCOMPLETE = "lockstep/incomplete"
"""Annotation of a job whose own objects are not all created yet."""
_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
GONE_SECONDS = 60.0
"""Seconds that a pod under deletion may stay after its grace. After that, no kubelet on its node acts on the deletion."""
_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


def condition(item: Object, kind: str, status: str | None = "True") -> Object:
    """Returns the condition of that type and status (None: any), or {}. Old conditions stay with status False."""
    conditions = [one for one in mappings(get(item, "status", "conditions")) if one.get("type") == kind]
    return next((one for one in conditions if status in (None, one.get("status"))), {})


def status_from_pods(
    job: Object, pods: list[Object], events: list[Object], workload: Object | None, hosts: list[str], ranks: int,
    now: float, live: bool = False,
) -> Status:  # fmt: skip
    """Returns the status of a PyTorchJob or TrainJob.

    Args:
        hosts: host names of the job's pods in the order of their ranks.
        ranks: ranks in each pod.
        now: seconds since the epoch.
        live: whether the other pods continue if a pod other than the first one is lost.
    """
    places = {host: node for node, host in enumerate(hosts)}
    replaced = _replaced(job, pods, events)
    pods = newest(pods)
    known = {None, *(get(item, "metadata", "uid") for item in [job, *pods])}
    since = get(job, "metadata", "creationTimestamp") or ""
    # Events of an earlier job with the same name stay for an hour. Those of a TrainJob's batch Job are known by their time.
    events = [
        event for event in events
        if get(event, "involvedObject", "uid") in known
        or (get(event, "involvedObject", "name") == maker(job) and (seen_at(event) or "~") >= since)
    ]  # fmt: skip
    parts = [_part(pod, ranks, places, now, replaced.get(host(pod), (0, ""))) for pod in pods]
    parts.sort(key=lambda part: (part.ranks or [1 << 30], part.name))
    state, reason, code = _classify(_Seen(job, pods, events, workload, len(hosts), now))
    again = [f"{name} was replaced: {why}" for name, (_, why) in sorted(replaced.items()) if why]
    if state in ("pending", "restarting") and again and (state == "restarting" or reason.endswith(STARTING)):
        state, reason = "restarting", again[0]
    first = next((pod for pod in pods if host(pod) == hosts[0]), None)
    if live and state == "restarting" and hosts[0] not in replaced and get(first, "status", "phase") == "Running":
        state, reason = "running", f"{reason}; the others train on"
    return Status(state, reason, parts, code)


STARTING = "the others are starting"
NO_CODE = "it ended without an exit code: it was evicted, or taken from its node"
_EXITED = re.compile(r"Pod: [^.]+\.(?P<name>\S+) exited with code (?P<code>\d+)")
_DELETED = re.compile(r"Deleted pod: (?P<name>\S+)")
_ENDED = ("Evicted", "Preempted", "Preempting", "UnexpectedAdmissionError", "TaintManagerEviction", "NodeShutdown")
"""Reasons of events that end a pod."""


def _replaced(job: Object, pods: list[Object], events: list[Object]) -> dict[str, tuple[int, str]]:
    """Returns host → (number of its pod's replacements, reason of the last one).

    The operator at once replaces a pod that ended with 128 or above, or without a code. Only the pod's events remain, for an hour. A
    batch Job keeps the failed pods.
    """
    uid, since = get(job, "metadata", "uid"), str(get(job, "metadata", "creationTimestamp") or "")
    own = [event for event in events if get(event, "involvedObject", "uid") == uid]
    counts: dict[str, int] = {}
    whys: dict[str, str] = {}
    # Pods are also deleted when a job is suspended.
    for event in own if any(event.get("reason") == "PyTorchJobRestarting" for event in own) else ():
        message = str(event.get("message") or "")
        if event.get("reason") == "SuccessfulDeletePod" and (deleted := _DELETED.fullmatch(message)):
            counts[deleted["name"]] = counts.get(deleted["name"], 0) + int(event.get("count") or 1)
        elif event.get("reason") == "ExitedWithCode" and (exited := _EXITED.fullmatch(message)):
            whys[exited["name"]] = _died(int(exited["code"]))
    for event in events:
        name = str(get(event, "involvedObject", "name"))
        if name in counts and event.get("reason") in _ENDED and seen_at(event) >= since:
            whys[name] = f"{event['reason']}: {event.get('message') or ''}"
    latest = {id(pod) for pod in newest(pods)}
    for pod in pods:
        if id(pod) not in latest:
            counts[host(pod)] = counts.get(host(pod), 0) + 1
            whys[host(pod)] = (_broken(pod) or ("it has ended", None))[0]
    return {name: (count, whys.get(name, NO_CODE)) for name, count in counts.items()}


def seen_at(event: Object) -> str:
    """Returns the time of an event's last occurrence. Such texts sort like times."""
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _died(code: int) -> str:
    if code == 128 + 15:
        return "a signal ended it after it had saved (exit code 143)"
    killed = " (SIGKILL: it ran out of memory, was evicted, or was killed)" if code == 128 + 9 else ""
    return f"exit code {code}{killed}"


def newest(pods: list[Object]) -> list[Object]:
    """Returns the latest pod of each host: a batch Job keeps failed pods in addition to their replacements."""
    oldest_first = sorted(pods, key=lambda pod: str(get(pod, "metadata", "creationTimestamp")))
    return list({host(pod): pod for pod in oldest_first}.values())


def owned_by(pod: Object, job: Object) -> bool:
    """Returns whether the pod belongs to the job with this uid. An owner reference names the job's uid, or the batch Job of a TrainJob."""
    owners = mappings(get(pod, "metadata", "ownerReferences"))
    if job.get("kind") != "TrainJob":
        return get(job, "metadata", "uid") in [owner.get("uid") for owner in owners]
    since, made = (str(get(item, "metadata", "creationTimestamp") or "") for item in (job, pod))
    return maker(job) in [owner.get("name") for owner in owners] and made >= since


def maker(job: Object) -> str:
    """Returns the name of the batch Job that makes a TrainJob's pods, and has the events of refused pods."""
    return f"{get(job, 'metadata', 'name')}-node-0" if job.get("kind") == "TrainJob" else ""


def host(pod: Object) -> str:
    """Returns the name under which the pod's launcher joins the others."""
    return str(get(pod, "spec", "hostname") or get(pod, "metadata", "name"))


def hosts(job: Object) -> list[str]:
    """Returns the host names of a job's pods in the order of ranks: the rendezvous sorts its nodes by their names, as text."""
    name = get(job, "metadata", "name")
    if job.get("kind") == "TrainJob":
        count = get(job, "spec", "trainer", "numNodes") or 1
        return sorted(f"{name}-node-0-{index}" for index in range(count))
    replicas = get(job, "spec", "pytorchReplicaSpecs") or {}
    counts = {kind: get(replica, "replicas") or 1 for kind, replica in replicas.items()}
    return sorted(f"{name}-{kind.lower()}-{index}" for kind, count in counts.items() for index in range(count))


def state_of(job: Object) -> State:
    """Returns the state from the job's own conditions, without a query of its pods."""
    state, *_ = _classify(_Seen(job, [], [], None, nodes=1, now=0.0))
    ready = any(item.get("ready") for item in mappings(get(job, "status", "jobsStatus")))
    is_complete = get(job, "metadata", "annotations", INCOMPLETE) is None
    return "running" if state == "pending" and is_complete and (condition(job, "Running") or ready) else state


def _is_suspended(job: Object) -> bool:
    """Returns whether the spec suspends the job. The condition `Suspended` may be out of date: if pods are refused, the operator writes
    no status."""
    return bool(get(job, "spec", "suspend") or get(job, "spec", "runPolicy", "suspend"))


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of a job that has not ended, as the cluster reports it."""

    job: Object
    pods: list[Object]
    events: list[Object]
    workload: Object | None
    nodes: int
    now: float

    def in_phase(self, phase: str) -> list[Object]:
        return [pod for pod in self.pods if get(pod, "status", "phase") == phase]

    def event_of(self, pod: Object, reason: str) -> str:
        name = get(pod, "metadata", "name")
        events = [e for e in self.events if e.get("reason") == reason and get(e, "involvedObject", "name") == name]
        return str(events[-1].get("message") or "") if events else ""

    def under_way(self) -> Iterator[tuple[State, str]]:
        """Yields the state and the reason of every test that holds. The first one counts."""
        job, pods = self.job, self.pods
        if get(job, "metadata", "deletionTimestamp"):
            yield "running", f"is being cancelled{stuck_reason(pods, self.now)}"
        if get(job, "metadata", "annotations", INCOMPLETE) is not None:
            yield "pending", "is being submitted; where that was cut off, submit it again to finish it, or cancel it"
        if self.workload is not None and not condition(self.workload, "Admitted"):
            yield "queued", _waiting_in_a_queue(self.workload)
        if _is_suspended(job) and self.workload is None and (queue := get(job, "metadata", "labels", KUEUE_QUEUE)):
            yield "queued", f"queue {queue} has not seen it yet: is Kueue there? (`lockstep doctor k8s`)"
        if _is_suspended(job):
            yield "queued", "suspended: it waits for someone to resume it"
        yield from (("running", text) for pod in pods if (text := _unreachable_node(pod, self.now)))
        yield from (("pending", text) for pod in pods if (text := _waiting(pod)))
        # This lasts until the operator replaces the pod or reports that the job has failed: seconds to minutes.
        yield from (("restarting", broken[0]) for pod in pods if (broken := _broken(pod)) is not None)
        if why := self.unscheduled():
            yield "unschedulable", why
        if restarting := condition(job, "Restarting"):
            yield "restarting", str(restarting.get("message") or "")
        for pod in (pod for pod in pods if get(pod, "metadata", "deletionTimestamp")):
            yield "restarting", f"{get(pod, 'metadata', 'name')} is being ended, and will be replaced"
        run = len(self.in_phase("Running"))
        if run >= self.nodes and not self.in_phase("Pending"):
            yield "running", f"{run}/{self.nodes} pods run"
        yield "pending", self.starting() if pods else self.without_pods()

    def unscheduled(self) -> str | None:
        placed = [pod for pod in self.pods if get(pod, "spec", "nodeName") or condition(pod, "PodScheduled")]
        for pod in self.in_phase("Pending"):
            last = condition(pod, "PodScheduled", None)
            refused = last.get("status") == "False" and last.get("reason") in ("Unschedulable", "SchedulerError")
            message = str(last.get("message") or "") if refused else ""
            if refused or not get(pod, "spec", "nodeName"):
                message = message or self.event_of(pod, "FailedScheduling")
            if message:
                return f"{len(placed)}/{self.nodes} pods are placed: {message}"
        return None

    def refused(self) -> str:
        """Returns the cluster's message to pods that it refuses: quota, PodSecurity, LimitRange. The job has no condition for this."""
        makers = (get(self.job, "metadata", "name"), maker(self.job))
        latest = max((str(get(pod, "metadata", "creationTimestamp")) for pod in self.pods), default="")
        events = [
            event for event in self.events
            if str(event.get("reason")).startswith("FailedCreate") and get(event, "involvedObject", "name") in makers
            and (seen_at(event) or "~") >= latest  # later pods prove that the refusal is over
        ]  # fmt: skip
        if not events or len(self.pods) >= self.nodes:
            return ""
        return str(events[-1].get("message") or "").removeprefix("Error creating: ")

    def starting(self) -> str:
        """Returns why not all pods run. The most frequent reason for a placed pod is a volume."""
        for pod in self.in_phase("Pending"):
            for reason in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"):
                if message := self.event_of(pod, reason):
                    return f"{get(pod, 'metadata', 'name')}: {message}"
        others = f"the others are refused: {refused}" if (refused := self.refused()) else STARTING
        return f"{len(self.in_phase('Running'))}/{self.nodes} pods run, {others}"

    def without_pods(self) -> str:
        warnings = [str(event.get("message") or "") for event in self.events if event.get("type") == "Warning"]
        nothing = "no pods yet: is the operator running? (`lockstep doctor k8s`)"
        return self.refused() or (warnings[-1] if warnings else "") or nothing


def _waiting_in_a_queue(workload: Object) -> str:
    queue = get(workload, "spec", "queueName") or "?"
    for kind in ("Evicted", "Preempted"):
        if ended := condition(workload, kind):
            return f"waiting in queue {queue} after {kind.lower()[:-2]}ion: {ended.get('message') or ''}"
    message = str(condition(workload, "QuotaReserved", None).get("message") or "")
    return f"waiting for quota in queue {queue}" + (f": {' '.join(message.split())}" if message else "")


def _classify(seen: _Seen) -> tuple[State, str, int | None]:
    if condition(seen.job, "Succeeded") or condition(seen.job, "Complete"):
        return "succeeded", "", EXIT_DONE
    if failed := condition(seen.job, "Failed"):
        return _failure(failed, seen.pods, seen.events)
    return (*next(seen.under_way()), None)


def _failure(failed: Object, pods: list[Object], events: list[Object]) -> tuple[State, str, int]:
    message = str(failed.get("message") or "")
    if failed.get("reason") == "DeadlineExceeded" or "longer than specified deadline" in message:
        return "timed_out", "the time limit is over", EXIT_TIMED_OUT
    ends = [(pod, broken) for pod in pods if (broken := _broken(pod)) is not None]
    ends.sort(key=lambda pair: str(get(_terminated(pair[0]), "finishedAt") or "~"))
    failures = [(str(get(pod, "metadata", "name")), text, code) for pod, (text, code) in ends]
    for event in reversed(events if not failures else []):  # the pod and its log are gone; above 127 it was replaced
        last = _EXITED.fullmatch(str(event.get("message") or ""))
        if last is not None and int(last["code"]) < 128:
            text = f"{last['name']} ended with exit code {last['code']}, and its log is gone"
            failures.append((last["name"], text, int(last["code"])))
    for name, text, code in failures:
        if code == EXIT_USAGE:
            return "failed", f"{name}: wrong usage, config or data (exit code 2): see `lockstep logs`", EXIT_USAGE
        if code == 128 + 15:
            return "preempted", f"a signal ended {name} after it had saved; submit it again to resume", EXIT_PREEMPTED
        return "failed", text, EXIT_FAILED
    if failed.get("reason") == "BackoffLimitExceeded" or "specified backoff limit" in message:
        return "failed", "all restarts are used up", EXIT_FAILED
    return "failed", message, EXIT_FAILED


def _broken(pod: Object) -> tuple[str, int | None] | None:
    """Returns how the pod failed, and its exit code. An eviction or a lack of memory says more than a code."""
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
        why = get(pod, "status", "message") or get(pod, "status", "reason") or "no reason given"
        return f"{name} failed: {why}", None
    return None


def _unreachable_node(pod: Object, now: float) -> str:
    """Returns a sentence if the pod's node does not answer; else "". Pods of a dead node keep the phase Running, and stay Terminating
    forever."""
    name, node = get(pod, "metadata", "name"), get(pod, "spec", "nodeName")
    silent = f"the node {node} of {name} does not answer" if node else f"the node of {name} does not answer"
    ready = condition(pod, "Ready", None)
    if get(pod, "status", "phase") == "Running" and ready and ready.get("status") != "True":
        # A kubelet gives its own reasons. The control plane gives one of these for a dead node, or none and leaves the containers ready.
        reason = ready.get("reason")
        if reason in ("NodeNotReady", "NodeLost") or (not reason and condition(pod, "ContainersReady")):
            return silent
    if get(pod, "status", "phase") == "Unknown":
        return silent
    until = seconds_of(get(pod, "metadata", "deletionTimestamp"))  # includes the grace period
    if until is not None and now > until + GONE_SECONDS:
        return f"{silent}: the pod should have ended long ago"
    return ""


def stuck_reason(pods: list[Object], now: float) -> str:
    """Returns why a deletion does not end, if all remaining pods are on nodes that do not answer; else ""."""
    silent = [_unreachable_node(pod, now) for pod in pods]
    if not pods or not all(silent):
        return ""
    names = " ".join(str(get(pod, "metadata", "name")) for pod in pods)
    return f": {silent[0]}. When that node stays away, an administrator must remove its pods: kubectl delete pod --force {names}"


def _part(pod: Object, ranks: int, places: dict[str, int], now: float, replaced: tuple[int, str]) -> NodeStatus:
    node = places.get(host(pod))
    owned = [] if node is None else list(range(node * ranks, (node + 1) * ranks))
    statuses = mappings(get(pod, "status", "containerStatuses"))
    end, silent = _terminated(pod), _unreachable_node(pod, now)
    times, why = replaced
    last = f"replaced: {why}" if why else ""
    reason = silent or _waiting(pod) or (f"exit code {end.get('exitCode')}" if end else last)
    ending, phase = get(pod, "metadata", "deletionTimestamp"), str(get(pod, "status", "phase") or "unknown").lower()
    state = "unknown" if silent else "terminating" if ending else phase
    restarts = times + sum(int(item.get("restartCount") or 0) for item in statuses)
    return NodeStatus(str(get(pod, "metadata", "name")), owned, state, reason, restarts)


def _terminated(pod: Object) -> Object | None:
    """Returns how the pod's own container ended, or an init container that failed, with its name. Sidecars do not count."""
    for key in ("initContainerStatuses", "containerStatuses"):
        for item in mappings(get(pod, "status", key)):
            end, init = get(item, "state", "terminated"), key == "initContainerStatuses"
            ours = item.get("name") in CONTAINERS.values() or (init and get(end, "exitCode") != 0)
            if isinstance(end, dict) and ours:
                return {**end, "container": item.get("name"), "init": init}
    return None


def _waiting(pod: Object) -> str:
    """Returns why a container of the pod cannot start, if waiting does not help; else ""."""
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


INSTALL = {"PyTorchJob": "the Kubeflow training-operator", "TrainJob": "Kubeflow Trainer"}
_DENIED = re.compile(r'admission webhook "(?P<name>[^"]+)" denied the request: (?P<why>.*)')


class ApiError(UserError):
    """The server's refusal: HTTP status, its reason word, its own message, and as text what to do.

    Args:
        path: path of the request.
    """

    def __init__(self, status: int, reason: str, message: str, path: str = "") -> None:
        super().__init__(_advice(status, reason, message, path))
        self.status, self.reason, self.message = status, reason, message


class Failing(Unreachable):
    """An error of the server itself, or of a webhook that it calls, at every attempt."""


def _advice(status: int, reason: str, message: str, path: str) -> str:
    kind = next((kind for kind, (_, plural) in KINDS.items() if f"/{plural}" in path), "")
    if status == 403:
        return _forbidden(message)
    if status == 404 and kind and not reason:  # for a kind that is not served, the answer has no reason
        return f"the cluster does not have {kind}: install {INSTALL[kind]}, see `lockstep doctor k8s`"
    advice = ""
    if kind == "TrainJob" and outdated(message):
        advice = "; a TrainJob needs Kubeflow Trainer 2.3 or later: ask for it, or use k8s.kind PyTorchJob"
    return f"the cluster refuses ({status} {reason}): {message}{advice}"


def outdated(message: str) -> bool:
    """Returns whether Trainer is too old for a field of the job."""
    return "unknown field" in message and "runtimePatches" in message


def _forbidden(message: str) -> str:
    """Returns advice for a 403, which has four causes. The forbidden object stands before the reason, and its name may contain any text."""
    if webhook := _DENIED.fullmatch(message):
        return f"the cluster's admission webhook {webhook['name']} refuses it: {webhook['why']}"
    why = message.rpartition(" is forbidden: ")[2]
    if why.startswith("exceeded quota"):
        return f"the namespace's quota does not allow it: {message}; wait for other jobs to end, or ask for more"
    if "being terminated" in why or "is terminating" in why:
        return f"the namespace is being deleted: {message}; use another one, or wait until it is there again"
    return f"not allowed: {message}; ask for the rights in deploy/k8s/base/rbac.yaml of this version"
