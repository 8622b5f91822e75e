"""Status of a job from its containers: pure functions of `docker inspect` and status.json."""

from __future__ import annotations

from lockstep.training import contract

from .. import records
from ..manifest import Manifest, get, seconds_of
from ..process import signal_name
from ..spec.model import JobSpec
from ..status import NodeStatus, State, Status

_RUNNING = ("running", "paused", "restarting")


def moment(text: object) -> float:
    """Returns a time of the engine, which is UTC, as whole seconds since the epoch; 0 if there is none."""
    return max(0.0, seconds_of(f"{str(text)[:19]}Z") or 0.0)


def status_from_containers(nodes: list[Manifest], spec: JobSpec, run_status: records.RunStatus | None) -> Status:
    """Returns the status of a job.

    Args:
        nodes: the engine's description of the job's containers, in the order of the nodes.
        spec: the specification of the job.
        run_status: the status.json of this job's run.
    """
    parts = [_part(node, index, spec, records.restarts(run_status)) for index, node in enumerate(nodes)]
    states = [str(get(node, "State", "Status")) for node in nodes]
    if any(state in _RUNNING for state in states):
        lost = [part for part in parts if part.state == "failed"]
        if lost and spec.live and states[0] in _RUNNING:
            without = f"{lost[0].reason}; the others train on: submit the job again, and it joins them"
            return Status("running", "; ".join(filter(None, (records.progress(run_status), without))), parts)
        if lost:
            reason = f"{lost[0].reason}; the other nodes wait for it: submit the job again to restart it"
            return Status("restarting", reason, parts)
        return Status("running", records.progress(run_status), parts)
    if any(state == "created" for state in states):
        error = next((str(get(node, "State", "Error")) for node in nodes if get(node, "State", "Error")), "")
        if error:
            return Status("failed", f"a node did not start: {' '.join(error.split())[:300]}", parts, 1)
        return Status("pending", "the containers are being started", parts)
    return _ended(nodes, parts, run_status)


def _ended(nodes: list[Manifest], parts: list[NodeStatus], run_status: records.RunStatus | None) -> Status:
    codes = [int(get(node, "State", "ExitCode") or 0) for node in nodes]
    reason = run_status.reason if run_status else ""
    code = _worst(codes)
    if run_status is not None and run_status.code is not None:
        code = run_status.code

    def answer(state: State, text: str) -> Status:
        return Status(state, text, parts, code)

    if code == contract.EXIT_DONE:
        return answer("succeeded", reason or "complete")
    if contract.EXIT_TIMED_OUT in codes:
        return answer("timed_out", "the time limit is over")
    if code == contract.EXIT_PREEMPTED:
        return answer("preempted", reason or "saved; submit it again to resume")
    starved = next((part for part, node in zip(parts, nodes) if get(node, "State", "OOMKilled")), None)
    if starved is not None:
        return answer("failed", starved.reason)
    first = next((part.reason for part, own in zip(parts, codes) if own > 128), "") or next(
        (part.reason for part in parts if part.reason), ""
    )
    return answer("failed", reason or first or f"exit code {code}")


def _worst(codes: list[int]) -> int:
    """Returns the worst exit code: wrong usage, then failures, then preemptions, in the order of the launcher."""
    if contract.EXIT_USAGE in codes:
        return contract.EXIT_USAGE
    bad = [code for code in codes if code not in (contract.EXIT_DONE, contract.EXIT_PREEMPTED)]
    return bad[0] if bad else max(codes, default=0)


def _part(node: Manifest, index: int, spec: JobSpec, restarts: int) -> NodeStatus:
    name, width = str(get(node, "Config", "Hostname")), spec.ranks
    return NodeStatus(name, list(range(index * width, (index + 1) * width)), *_state(node, name), restarts)


def _state(node: Manifest, name: str) -> tuple[str, str]:
    """Returns the state of a container, and its reason."""
    status, code = str(get(node, "State", "Status")), int(get(node, "State", "ExitCode") or 0)
    if status in _RUNNING:
        health = get(node, "State", "Health", "Status")
        return "running", "unhealthy: see docker inspect" if health == "unhealthy" else ""
    if status == "created":
        return "pending", ""
    if get(node, "State", "OOMKilled") and code != 0:
        limit = int(get(node, "HostConfig", "Memory") or 0) >> 20
        reason = f"{name} was killed for memory (OOMKilled, limit {limit} MiB): raise memory, or lower the batch size"
        return "failed", reason
    if code == contract.EXIT_DONE:
        return "succeeded", ""
    if code == contract.EXIT_PREEMPTED:
        return "preempted", f"{name} has saved and ended"
    if code > 128:
        return "failed", f"{name} was killed by {signal_name(code - 128)}"
    return "failed", f"{name} ended with exit code {code}: see `lockstep logs compose`"
