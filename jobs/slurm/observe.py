"""What SLURM says about a job, and what that means: the controller first (live, needs no accounting), then its history (sacct).

Never what submitit cached: it calls a requeued job done, and keeps that for good. `explain` makes a status of what SLURM,
status.json and the tasks' notes say; it is a pure function.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.training import files
from lockstep.training.contract import EXIT_DONE, EXIT_PREEMPTED, EXIT_USAGE, STATUS_FILE, UserError
from lockstep.wire import submitit_api

from .. import records
from ..records import Note, Said
from ..spec.model import JobSpec
from ..status import NodeStatus, State, Status, Unreachable

JOB = "job.json"
ENDED = "ended.json"
SUBMITIT = "submitit"
SECONDS = 60.0
"""How long an answer may take by default."""
Told = subprocess.CompletedProcess[str]
UNKNOWN_JOB = re.compile(r"invalid job id|jobs? (\S+ )?not found|does not exist", re.I)
NO_CONTACT = re.compile(
    r"unable to contact|timed out|zero bytes|connection refused|standby mode|resolve_ctls_from_dns_srv|"
    r"could not establish a configuration source", re.I,
)  # fmt: skip
"""What SLURM's commands say where they had no answer, and not one that is a refusal."""
NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.I)


@dataclass(frozen=True, slots=True)
class Known:
    """One job as SLURM knows it. `started` and `ended` are seconds since the epoch, None where it has not."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0
    nodes: str = ""
    partition: str = ""
    requeue: bool = True
    ended: float | None = None
    started: float | None = None
    """When it had its nodes, the last time."""


class Forgotten(Unreachable):
    """The accounting does not answer, which alone would know how a job ended that the controller has forgotten."""


def ask(*command: str, seconds: float = SECONDS) -> Told:
    """Runs a SLURM command. Raises `UserError` where it is not installed, `Unreachable` where it does not end."""
    try:
        return subprocess.run(
            command, env={**os.environ, "SLURM_TIME_FORMAT": "%s"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise missing(command[0]) from None
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer for {seconds:g} s") from None


def missing(program: str) -> UserError:
    return UserError(
        f"{program} is not installed here: submit from a node of a SLURM cluster, see `lockstep doctor slurm`, or set slurm.host"
    )


def answer(*command: str) -> str:
    """What a SLURM command prints; nothing for a job that it does not know. Raises `Unreachable` for any other failure."""
    told = ask(*command)
    if told.returncode != 0 and not unknown(told):
        raise silent(told)
    return told.stdout


def order(*command: str) -> bool:
    """Whether SLURM does it: a job that has just ended, or is in another state, is no failure. Raises `Unreachable`."""
    told = ask(*command)
    if told.returncode != 0 and NO_CONTACT.search(told.stderr):
        raise silent(told)
    return told.returncode == 0


def unknown(told: Told) -> bool:
    """Whether SLURM has said that there is no such job: any other failure says nothing about the job."""
    return told.returncode != 0 and UNKNOWN_JOB.search(told.stdout + told.stderr) is not None


def silent(told: Told) -> Unreachable:
    return Unreachable(
        f"the SLURM controller does not answer: {one_line(told.stderr) or f'exit code {told.returncode}'}"
    )


Look = Callable[[str], Known | None]


def look(job_id: str) -> Known | None:
    """The job; None where neither the controller nor the accounting knows it. Raises `Unreachable`, `Forgotten`."""
    shown = ask("scontrol", "show", "job", "-o", job_id)
    if shown.returncode == 0:
        found = [job for line in shown.stdout.splitlines() if (job := read(line)) is not None]
        if found:
            return found[0]
    try:
        past = history(job_id).get(job_id)
    except Forgotten:
        if unknown(shown):
            raise
        past = None
    # If the controller has forgotten a job that the accounting calls running, that job never ends.
    if past is not None and past.ended is not None:
        return past
    if not unknown(shown):
        raise silent(shown)
    return None


def read(line: str) -> Known | None:
    """One line of `scontrol show job -o`."""

    def value(name: str) -> str:
        match = re.search(rf"(?:^|\s){name}=(\S*)", line)
        return "" if match is None or match[1] in ("(null)", "None") else match[1]

    if not value("JobId"):
        return None
    element = value("ArrayTaskId")
    job_id = f"{value('ArrayJobId')}_{element}" if element.isdigit() else value("JobId")
    state = value("JobState")
    return Known(
        job_id, state, value("Reason"), _number(value("Restarts")), _number(value("ExitCode").split(":")[0]),
        value("NodeList"), value("Partition"), value("Requeue") != "0",
        _number(value("EndTime")) or None if final(state) else None, _number(value("StartTime")) or None,
    )  # fmt: skip


def history(*job_ids: str) -> dict[str, Known]:
    """What the accounting remembers, by id; nothing without accounting, or of a job it has not heard of yet. Raises `Forgotten`."""
    try:
        told = ask("sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", _REMEMBERED)
    except UserError as error:
        if isinstance(error, Unreachable):
            raise Forgotten(str(error)) from None
        return {}
    if told.returncode != 0 and not NO_ACCOUNTING.search(told.stderr):
        raise Forgotten(
            f"the SLURM accounting does not answer: {one_line(told.stderr) or f'exit code {told.returncode}'}"
        )
    found = {}
    for line in told.stdout.splitlines() if told.returncode == 0 else []:
        job_id, state, code, nodes, partition, end, start = (line.split("|") + [""] * 7)[:7]
        state = state.split(" ")[0]  # CANCELLED by 1000
        ended = (_number(end) or time.time()) if final(state) else None
        found[job_id] = Known(
            job_id, state, "", 0, _number(code.split(":")[0]), nodes, partition, True, ended, _number(start) or None
        )  # fmt: skip
    return found


_REMEMBERED = "JobID,State,ExitCode,NodeList,Partition,End,Start"
_QUEUED = ("JobArrayID", "State", "Reason", "RestartCnt", "exit_code", "NodeList", "Partition", "Requeue", "EndTime")
_WIDTH = 200
"""Of a column of squeue, which cuts off what is longer."""


def look_at_all(job_ids: list[str]) -> Look:
    """`look` for many jobs of this user, with one question to the controller and one to the accounting. Raises `Unreachable`."""
    columns = ",".join(f"{name}:{_WIDTH}" for name in _QUEUED)
    shown = answer("squeue", "-h", "-r", "--me", "-t", "all", "-O", columns)
    known = {}
    for line in shown.splitlines():
        row = [line[at : at + _WIDTH].strip() for at in range(0, _WIDTH * len(_QUEUED), _WIDTH)]
        job_id, state, reason, restarts, code, nodes, partition, requeue, end = row
        known[job_id] = Known(
            job_id, state, "" if reason == "None" else reason, _number(restarts), _number(code.split(":")[0]),
            nodes, partition, requeue not in ("0", "no"), _number(end) or None if final(state) else None,
        )  # fmt: skip
    away, forgotten = [job_id for job_id in job_ids if job_id not in known], None
    try:
        past = history(*away) if away else {}
    except Forgotten as error:
        past, forgotten = {}, error

    def found(job_id: str) -> Known | None:
        if job_id in away and forgotten is not None:
            raise forgotten
        gone = past.get(job_id)
        return known.get(job_id) or (gone if gone is not None and gone.ended is not None else None)

    return found


def mine(name: str, comment: str) -> str | None:
    """The id of a job (or array) of this user with that name and comment: one whose answer to sbatch was lost.

    Raises:
        Unreachable: it may be there.
    """
    for line in answer("squeue", "-h", "--me", "-n", name, "-t", "all", "-o", "%F|%k").splitlines():
        job_id, _, said = line.partition("|")
        if said == comment:
            return job_id
    return None


FINAL = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED",
)  # fmt: skip


def nodes(job_id: str) -> tuple[str, list[str]]:
    """The id that srun takes (a part of an array has one of its own), and the nodes of a job in the order of their ranks.

    Raises:
        UserError: it runs on none.
        Unreachable: the controller does not answer.
    """
    placed = answer("squeue", "-h", "-j", job_id, "-o", "%A|%N")
    own, _, names = next(iter(placed.splitlines()), "").partition("|")
    if not re.fullmatch(r"\d+", own) or not names:
        raise UserError(f"the SLURM job {job_id} runs on no node: it has ended, or has not started")
    return own, answer("scontrol", "show", "hostnames", names).split()


def in_the_order_of_ranks(spec: JobSpec, hosts: list[str]) -> list[str]:
    """SLURM's nodes of a job. The launchers of a live one sort them by their names, as text, behind the first one."""
    return [*hosts[:1], *sorted(hosts[1:])] if spec.live else hosts


def final(state: str) -> bool:
    return state in FINAL


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,12}", text) else 0


def submitted(folder: Path) -> dict[str, Any] | None:
    """job.json; its `job_id` is None until sbatch has answered. None where there is none, or it is damaged."""
    record = records.read(folder / JOB, records.SlurmJob)
    return None if record is None else {"element": None, **record}


def write(folder: Path, record: dict[str, Any]) -> None:
    """Raises `OSError`."""
    files.replace_json(folder / JOB, record)


def ended(folder: Path) -> dict[str, Any] | None:
    """ended.json: how the job has ended, once that is known."""
    ending = records.read(folder / ENDED, records.SlurmEnded)
    return None if ending is None else {**ending}


def write_end(folder: Path, plain: dict[str, Any]) -> None:
    """Raises `OSError`."""
    files.replace_json(folder / ENDED, plain)


class Notes:
    """What the ranks and their tasks have left of one job."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record, self._job_id, self._folder = record, str(record["job_id"]), Path(record["submitit"])

    @property
    def said(self) -> records.Said | None:
        """status.json of this very job, which is trusted above exit codes; not one of another run in the same folder."""
        return records.said(Path(self._record["run_dir"]), self._record["job"])

    @property
    def age(self) -> float:
        """Seconds since status.json was written, or since the submission."""
        try:
            return time.time() - (Path(self._record["run_dir"]) / STATUS_FILE).stat().st_mtime
        except OSError:
            return time.time() - float(self._record["since"])

    @property
    def ends(self) -> dict[int, records.Note]:
        """What the tasks noted when their ranks ended: rank → {code, reason, restart, host, time}."""
        found: dict[int, records.Note] = {}
        for path in self._folder.glob(f"{self._job_id}_*_end.json"):
            match = re.fullmatch(rf"{re.escape(self._job_id)}_(\d+)_end\.json", path.name)
            end = records.read(path, records.Note) if match else None
            if match and end is not None:
                found[int(match[1])] = end
        return found

    @property
    def saved(self) -> set[int]:
        """The starts after which the job had saved and got further: they do not count against `max_restarts`."""
        mark = f"{self._job_id}_saved_"
        found = [path.name.removeprefix(mark) for path in self._folder.glob(f"{mark}*")]
        return {int(number) for number in found if number.isdecimal()}

    @property
    def cancelled(self) -> bool:
        return cancelled(self._record).exists()


def cancelled(record: dict[str, Any]) -> Path:
    """The note that somebody has asked lockstep to cancel the job."""
    return submitit_api.note(Path(record["submitit"]), str(record["job_id"]), "cancelled")


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
    spec: JobSpec, found: Known | None, ends: Ends, said: Said | None, cancelled: bool, since: float, now: float,
    free: Collection[int] = (), outage: bool = False,
) -> Status:  # fmt: skip
    """The status.

    Args:
        found: the job as SLURM knows it; None where SLURM does not know it, or does not answer.
        ends: what the tasks noted, by rank.
        said: status.json of this job; None where it has none (yet).
        cancelled: somebody asked lockstep to cancel it.
        since: seconds since the epoch when it was submitted.
        free: starts after which it had saved and got further, which do not count against `max_restarts`.
        outage: SLURM does not answer. Then only the job's own files count, and it has ended where SLURM does not start it again.
    """
    total = 1 if spec.live else spec.nodes * spec.ranks
    latest = max((int(end.get("restart", 0)) for end in ends.values()), default=0)
    restarts = max(found.restarts if found else 0, latest)
    ends = {rank: end for rank, end in ends.items() if int(end.get("restart", 0)) == restarts}
    failures = restarts - sum(start < restarts for start in free)
    used_up = restarts not in free and failures >= spec.max_restarts
    own = (
        said is None or spec.live or said.get("restart", restarts) == restarts
    )  # a live job's launcher counts for itself
    if said is not None and said.get("code") is not None and not own:
        said = None  # an earlier start wrote it; this one ended before it could

    def answer(state: State, reason: str, code: int | None = None) -> Status:
        about = records.about_time(said, since, found.started if found is not None else None)
        return Status(state, reason, _parts(spec, found, state, restarts), code, **about)

    # Its first node says how a live job has ended: any other one may be lost.
    code = _code(said, {task: end for task, end in ends.items() if task == 0 or not spec.live}, total, spec)
    if outage and (code is None or not (code in (EXIT_DONE, EXIT_USAGE) or used_up or cancelled)):
        return answer("running", records.step(said)) if said is not None else answer("pending", "no rank has reported")
    if found is None:
        if code is None and now - since < SETTLE_SECONDS:
            return answer("pending", "SLURM does not know it yet")
        if code is None:
            return answer("lost", "SLURM no longer knows the job, and it left no result")
        return _ended(answer, code, said, ends, spec, cancelled, used_up)
    if found.state == "PENDING":
        return answer(*pending(found.reason, found.partition, found.job_id, restarts))
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
        if not cancelled and pending(found.reason, "", "", 0)[0] == "unschedulable":
            return answer("failed", pending(found.reason, found.partition, found.job_id, 0)[1], 1)
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
    answer: Callable[..., Status], code: int, said: Said | None, ends: Ends, spec: JobSpec, cancelled: bool, used_up: bool
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
    if said is not None and said["code"] is not None and spec.recipe is not None and not spec.live:
        return said["code"]
    bad = [int(end["code"]) for end in ends.values() if end["code"] != EXIT_DONE]
    if bad:
        return next((code for code in (2, EXIT_PREEMPTED) if code in bad), bad[0])
    return EXIT_DONE if len(ends) >= total else None


def _progress(said: Said | None, found: Known, restarts: int) -> str:
    where = f" on {found.nodes}" if found.nodes else ""
    again = f", restart {restarts}" if restarts else ""
    if found.state == "COMPLETING":
        return f"is ending{where}{again}"
    step = records.step(said) if said is not None else "starting"
    other = "" if found.state == "RUNNING" else f" ({found.state.lower()})"
    return f"{step}{where}{again}{other}{records.trouble(said) if said is not None else ''}"


def _plain(found: Known) -> str:
    what = {"NODE_FAIL": "a node failed", "BOOT_FAIL": "a node did not boot", "PREEMPTED": "preempted"}[found.state]
    return f"{what}{f' ({found.nodes})' if found.nodes else ''}"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks[:8]))


def _parts(spec: JobSpec, found: Known | None, state: State, restarts: int) -> list[NodeStatus]:
    hosts = in_the_order_of_ranks(spec, submitit_api.node_names(found.nodes) if found is not None else [])
    return [
        NodeStatus(
            hosts[node] if node < len(hosts) else f"node {node}",
            list(range(node * spec.ranks, (node + 1) * spec.ranks)), state, "", restarts,
        )
        for node in range(spec.nodes)
    ]  # fmt: skip


_REASONS: dict[str, tuple[State, str]] = {
    "Priority": ("queued", "waits behind jobs of higher priority in partition {partition}"),
    "Resources": ("pending", "waits for nodes to be free in partition {partition}"),
    "BeginTime": ("pending", "waits for its start time"),
    "Dependency": ("pending", "waits for the job that it depends on"),
    "DependencyNeverSatisfied": ("unschedulable", "the job that it depends on has failed: see its logs, then submit again"),
    "JobHeldUser": ("pending", "is held: scontrol release {job}"),
    "JobHeldAdmin": ("pending", "is held by an administrator: ask why"),
    "JobHoldMaxRequeue": ("unschedulable", "was requeued more often than the cluster allows, and is held"),
    "Reservation": ("pending", "waits for its reservation"),
    "Licenses": ("pending", "waits for a licence"),
    "ReqNodeNotAvail": ("pending", "nodes that it needs are down, drained or reserved"),
    "PartitionDown": ("pending", "partition {partition} is down"),
    "PartitionInactive": ("pending", "partition {partition} is inactive"),
    "PartitionNodeLimit": ("unschedulable", "asks for more nodes than partition {partition} has or allows: lower nodes"),
    "PartitionTimeLimit": ("unschedulable", "time_limit is above the limit of partition {partition}: lower it"),
    "PartitionConfig": ("unschedulable", "partition {partition} does not allow such a job"),
    "BadConstraints": ("unschedulable", "no node has what constraint asks for"),
    "AccountNotAllowed": ("unschedulable", "the account may not use partition {partition}: set slurm.account"),
    "QOSNotAllowed": ("unschedulable", "the QOS may not use partition {partition}: set slurm.qos"),
    "InvalidAccount": ("unschedulable", "the account does not exist, or you are not in it: set slurm.account"),
    "InvalidQOS": ("unschedulable", "the QOS does not exist, or you may not use it: set slurm.qos"),
    "NodeDown": ("restarting", "a node that it ran on is down"),
    "Cleaning": ("restarting", "its last start is still being cleaned up"),
    "Prolog": ("pending", "the nodes run their prolog"),
}  # fmt: skip
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max)?(\w*?)(Limit)?")


def pending(reason: str, partition: str, job: str, restarts: int) -> tuple[State, str]:
    """State and sentence for a job that waits. `restarts` above 0: it has run before."""
    state, text = _find(reason)
    text = text.format(partition=partition or "?", job=job)
    if restarts and state in ("pending", "queued"):
        return "restarting", f"restart {restarts}: {text}"
    return state, text


def _find(reason: str) -> tuple[State, str]:
    name = re.split(r"[(,]", reason)[0]
    if name in _REASONS:
        return _REASONS[name]
    match = _LIMIT.fullmatch(name)
    if match:
        holder = "your account's association" if match[1] == "Assoc" else "the QOS"
        what = match[3] or "usage"
        alone = match[2] == "Max" and what.endswith(("PerJob", "PerNode", "WallDurationPerJob"))
        if alone:
            return "unschedulable", f"is above a limit of {holder} ({name}): ask for less"
        return "queued", f"waits: a limit of {holder} is reached ({name})"
    if name.startswith("Nodes_required_for_job_are_DOWN"):
        return _REASONS["ReqNodeNotAvail"]
    if "launch_failed" in name:
        return (
            "unschedulable",
            "its start failed on a node and it is held: scontrol release {job}, or see the node's log",
        )
    return "pending", name.replace("_", " ") if name else "waits for the scheduler"
