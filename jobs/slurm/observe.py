"""From what SLURM, status.json and the tasks' notes say to one status. `explain` is a pure function."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from lockstep.jobs.records import Note, Said
from lockstep.jobs.slurm import reasons
from lockstep.jobs.slurm.query import Found, final
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Part, State, Status
from lockstep.training.contract import EXIT_DONE, EXIT_PREEMPTED

SETTLE_SECONDS = 60.0
"""Seconds in which SLURM may still requeue a job whose node failed, and a file may not be visible yet."""
_COMES_BACK = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")

BEING_SUBMITTED = Status("pending", "is being submitted")
BROKEN_OFF = Status("lost", "the submission was interrupted before sbatch answered: submit it with --replace")

Ends = dict[int, Note]


def is_new(record: dict[str, Any]) -> bool:
    """Whether a job without a number may still be on its way to sbatch."""
    return time.time() - float(record["since"]) < SETTLE_SECONDS


def explain(
    spec: JobSpec, found: Found | None, ends: Ends, said: Said | None, cancelled: bool, since: float, now: float,
    free: Collection[int] = (),
) -> Status:  # fmt: skip
    """The status.

    Args:
        ends: what the tasks noted, by rank.
        said: status.json of this job; None where it has none (yet).
        cancelled: somebody asked lockstep to cancel it.
        since: seconds since the epoch when it was submitted.
        free: starts after which it had saved and got further, which do not count against `max_restarts`.
    """
    total = spec.nodes * spec.ranks
    latest = max((int(end.get("restart", 0)) for end in ends.values()), default=0)
    restarts = max(found.restarts if found else 0, latest)
    ends = {rank: end for rank, end in ends.items() if int(end.get("restart", 0)) == restarts}
    failures = restarts - sum(start < restarts for start in free)
    used_up = restarts not in free and failures >= spec.max_restarts
    if said is not None and said.get("code") is not None and said.get("restart", restarts) != restarts:
        said = None  # an earlier start wrote it; this one ended before it could

    def answer(state: State, reason: str, code: int | None = None) -> Status:
        return Status(state, reason, _parts(spec, found, state, restarts), code)

    code = _code(said, ends, total, spec)
    if found is None:
        if code is None and now - since < SETTLE_SECONDS:
            return answer("pending", "SLURM does not know it yet")
        if code is None:
            return answer("lost", "SLURM no longer knows the job, and it left no result")
        return _ended(answer, code, said, ends, spec, cancelled, used_up)
    if found.state == "PENDING":
        return answer(*reasons.pending(found.reason, found.partition, found.job_id, restarts))
    if found.state in ("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"):
        held = found.state in ("REQUEUE_HOLD", "SPECIAL_EXIT")
        text = f"is held: scontrol release {found.job_id}" if held else "SLURM starts it again"
        return answer("restarting", f"restart {restarts}: {text}")
    if not final(found.state):
        return answer("running", _progress(said, found, restarts))
    settled = now - (found.ended or since) >= SETTLE_SECONDS
    if code == EXIT_DONE:
        return answer("succeeded", (said["reason"] if said is not None else "") or "complete", EXIT_DONE)
    if found.state in _COMES_BACK and found.requeue and not used_up and not settled and not cancelled:
        return answer("restarting", f"{_plain(found)}: SLURM starts it again")
    if found.state == "COMPLETED":
        missing = sorted(set(range(total)) - set(ends))
        if not settled:
            return answer("running", f"has ended; the results of {_names(missing)} are not visible yet")
        return answer("failed", f"SLURM says COMPLETED, but {_names(missing)} left no result", 1)
    if found.state == "TIMEOUT":
        saved = "; the state is saved" if code == EXIT_PREEMPTED else ""
        return answer("timed_out", f"the time limit of {spec.time_limit} is over{saved}", 124)
    if cancelled or found.state in ("CANCELLED", "REVOKED"):
        if not cancelled and reasons.pending(found.reason, "", "", 0)[0] == "unschedulable":
            return answer("failed", reasons.pending(found.reason, found.partition, found.job_id, 0)[1], 1)
        return answer("cancelled", "cancelled; the state is saved" if code == EXIT_PREEMPTED else "cancelled", code)
    if found.state == "PREEMPTED":
        return answer("preempted", "preempted, and not started again: submit it again to resume", EXIT_PREEMPTED)
    if found.state == "OUT_OF_MEMORY":
        return answer("failed", "was killed for memory: raise memory, or lower the batch size", 1)
    if found.state in ("NODE_FAIL", "BOOT_FAIL"):
        used = " (max_restarts is used up)" if used_up else ""
        return answer("lost", f"{_plain(found)}, and the job was not started again{used}")
    return _ended(answer, code if code is not None else found.exit_code or 1, said, ends, spec, cancelled, used_up)


def _ended(
    answer: Any, code: int, said: Said | None, ends: Ends, spec: JobSpec, cancelled: bool, used_up: bool
) -> Status:  # fmt: skip
    if code == EXIT_DONE:
        return answer("succeeded", "complete", code)
    if cancelled:
        return answer("cancelled", "cancelled; the state is saved" if code == EXIT_PREEMPTED else "cancelled", code)
    if code == EXIT_PREEMPTED:
        left = f"all {spec.max_restarts} restarts are used up, by failures or by starts that made no progress"
        spent = left if used_up else "it was not requeued"
        return answer("preempted", f"saved, and {spent}: submit it again to resume", code)
    return answer("failed", cause(ends, said) or f"exit code {code}", code)


def cause(ends: Ends, said: Said | None) -> str:
    """The failure that came first, not the ones that followed from it: a rank's own error before a lost collective."""
    failed = [end for end in ends.values() if end["code"] not in (EXIT_DONE, EXIT_PREEMPTED)]
    failed.sort(key=lambda end: (not end.get("reason"), "did not arrive" in str(end.get("reason")), end.get("time", 0)))
    for end in failed:
        if end.get("reason"):
            return f"rank {end.get('rank')} on {end.get('host')}: {end['reason']}"
    if said is not None and said.get("code") not in (None, EXIT_DONE) and said.get("reason"):
        return str(said["reason"])
    return f"rank {failed[0].get('rank')} on {failed[0].get('host')}: exit code {failed[0]['code']}" if failed else ""


def _code(said: Said | None, ends: Ends, total: int, spec: JobSpec) -> int | None:
    """The job's own exit code: status.json above the tasks' notes; success needs all of them. None: not known."""
    if said is not None and said["code"] is not None and spec.recipe is not None:
        return said["code"]
    bad = [int(end["code"]) for end in ends.values() if end["code"] != EXIT_DONE]
    if bad:
        return next((code for code in (2, EXIT_PREEMPTED) if code in bad), bad[0])
    return EXIT_DONE if len(ends) >= total else None


def _progress(said: Said | None, found: Found, restarts: int) -> str:
    where = f" on {found.nodes}" if found.nodes else ""
    again = f", restart {restarts}" if restarts else ""
    if found.state == "COMPLETING":
        return f"is ending{where}{again}"
    step = f"step {said['step']}" if said is not None else "starting"
    other = "" if found.state == "RUNNING" else f" ({found.state.lower()})"
    return f"{step}{where}{again}{other}"


def _plain(found: Found) -> str:
    what = {"NODE_FAIL": "a node failed", "BOOT_FAIL": "a node did not boot", "PREEMPTED": "preempted"}[found.state]
    return f"{what}{f' ({found.nodes})' if found.nodes else ''}"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks[:8]))


def _parts(spec: JobSpec, found: Found | None, state: State, restarts: int) -> list[Part]:
    from submitit.slurm.slurm import _parse_node_list

    try:
        hosts = _parse_node_list(found.nodes) if found is not None and found.nodes else []
    except (ValueError, RuntimeError):
        hosts = []
    return [
        Part(
            hosts[node] if node < len(hosts) else f"node {node}",
            list(range(node * spec.ranks, (node + 1) * spec.ranks)), state, "", restarts,
        )
        for node in range(spec.nodes)
    ]  # fmt: skip
