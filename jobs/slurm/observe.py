"""SLURM's reports about a job, and their meaning: the controller first (live, needs no accounting), then the history (sacct).

submitit's cache is never used: it calls a requeued job done, and never corrects this. `status_from_slurm` makes a status from
SLURM, status.json and the tasks' notes.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.training import files
from lockstep.training.contract import EXIT_DONE, EXIT_PREEMPTED, EXIT_TIMED_OUT, EXIT_USAGE, UserError

from .. import records
from ..records import SlurmJob, TaskResult
from ..status import NodeStatus, State, Status, Unreachable

ENDED = "ended.json"
SECONDS = 60.0
"""Seconds to wait for an answer, by default."""
Output = subprocess.CompletedProcess[str]
UNKNOWN_JOB = re.compile(r"invalid job id|jobs? (\S+ )?not found|does not exist", re.I)
"""Answers that there is no such job. Any other failure says nothing about the job."""
NO_CONTACT = re.compile(
    r"unable to contact|timed out|zero bytes|connection refused|standby mode|resolve_ctls_from_dns_srv|"
    r"could not establish a configuration source", re.I,
)  # fmt: skip
"""Errors of SLURM's commands that got no answer. A refusal is no such error."""
NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.I)


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job as SLURM knows it. `ended` is in seconds since the epoch, or None."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0
    nodes: str = ""
    partition: str = ""
    requeue: bool = True
    ended: float | None = None


class Forgotten(Unreachable):
    """An error for a job of which nothing is known: sacct is down, and the controller no longer lists the job."""


def run_slurm(*command: str, seconds: float = SECONDS, **options: Any) -> Output:
    """Runs a SLURM command. Raises `UserError` if the command cannot be started, `Unreachable` if it does not end in time.

    Args:
        options: arguments of `subprocess.run`.
    """
    # A user's SQUEUE_PARTITION and the like would hide jobs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    given = {"env": {**env, "SLURM_TIME_FORMAT": "%s"}, "input": "", **options}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, **given
        )
    except OSError as error:
        raise UserError(
            f"cannot run {command[0]} ({error.filename}: {error.strerror}): submit from a node of a SLURM cluster, or set slurm.host"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer for {seconds:g} s") from None


def output(*command: str) -> str:
    """Returns the output of a SLURM command; nothing for an unknown job. Raises `Unreachable` for any other failure."""
    done = run_slurm(*command)
    if done.returncode != 0 and not UNKNOWN_JOB.search(done.stdout + done.stderr):
        raise unreachable(done)
    return done.stdout


def run_ok(*command: str) -> bool:
    """Returns whether SLURM executes the command. A job that has just ended, or is in another state, is no error. Raises `Unreachable`."""
    done = run_slurm(*command)
    if done.returncode != 0 and NO_CONTACT.search(done.stderr):
        raise unreachable(done)
    return done.returncode == 0


def unreachable(done: Output) -> Unreachable:
    return Unreachable(f"the SLURM controller does not answer: {_reason(done)}")


def _reason(done: Output) -> str:
    return one_line(done.stderr) or f"exit code {done.returncode}"


def accounting(*job_ids: str) -> dict[str, JobInfo]:
    """Returns the jobs that have ended by the accounting, by id; {} without accounting. Raises `Forgotten`."""
    try:
        done = run_slurm("sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", _COLUMNS_OF_SACCT)
    except UserError as error:
        if isinstance(error, Unreachable):
            raise Forgotten(str(error)) from None
        return {}
    if done.returncode != 0 and not NO_ACCOUNTING.search(done.stderr):
        raise Forgotten(f"the SLURM accounting does not answer: {_reason(done)}")
    known = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        job_id, state, code, nodes, partition, end = (line.split("|") + [""] * 6)[:6]
        state = state.split(" ")[0]  # CANCELLED by 1000
        # If the controller has forgotten a job that the accounting calls running, that job never ends.
        if state in FINAL:
            ended = _number(end) or time.time()
            known[job_id] = JobInfo(job_id, state, "", 0, _number(code.split(":")[0]), nodes, partition, True, ended)
    return known


_COLUMNS_OF_SACCT = "JobID,State,ExitCode,NodeList,Partition,End"
_COLUMNS_OF_SQUEUE = (
    "JobArrayID", "State", "Reason", "RestartCnt", "exit_code", "Partition", "Requeue", "EndTime", "NodeList",
)  # fmt: skip
_WIDTH, _WIDEST = 200, 8000
"""Width of a column of squeue, which cuts off longer values, and of the last column. A large job may have many ranges of nodes."""

Query = Callable[[str], JobInfo | None]
"""Returns the job of an id; None if neither the controller nor the accounting knows the job. Raises `Unreachable`, `Forgotten`."""


def query(*job_ids: str, all_of_user: bool = False) -> Query:
    """Returns the answers for these jobs, from one request to the controller and one to the accounting for those that it no longer lists.

    Args:
        all_of_user: also answer for other jobs of this user that the controller lists.
    """
    which = ["--me"] if all_of_user else ["-j", ",".join(job_ids)]
    *most, last = _COLUMNS_OF_SQUEUE
    columns = ",".join([*(f"{name}:{_WIDTH}" for name in most), f"{last}:{_WIDEST}"])
    known, unanswered = dict[str, JobInfo](), None
    try:
        lines = output("squeue", "-h", "-r", "-a", *which, "-t", "all", "-O", columns).splitlines()
    except Unreachable as error:
        lines, unanswered = [], error
    for line in lines:
        row = [line[at : at + _WIDTH].strip() for at in range(0, _WIDTH * len(most), _WIDTH)]
        job_id, state, reason, restarts, code, partition, requeue, end = row
        nodes = line[_WIDTH * len(most) :].strip()
        reason = "" if reason == "None" else reason.replace(" ", "_")  # as scontrol prints it
        known[job_id] = JobInfo(
            job_id, state, reason, _number(restarts), _number(code) >> 8 & 255, nodes, partition,
            requeue not in ("0", "no"), _number(end) or None if state in FINAL else None,
        )  # fmt: skip
    away = [job_id for job_id in job_ids if job_id not in known]
    try:
        known = {**(accounting(*away) if away else {}), **known}
    except Forgotten as error:
        unanswered = unanswered or error

    def result(job_id: str) -> JobInfo | None:
        if job_id not in known and unanswered is not None:
            raise unanswered
        return known.get(job_id)

    return result


def find_by_comment(name: str, comment: str) -> str | None:
    """Returns the id of this user's job (or array) with that name and comment; None if there is none. The answer of sbatch was lost.

    Raises:
        Unreachable: the controller does not answer, so the job may exist.
    """
    for line in output("squeue", "-h", "--me", "-n", name, "-t", "all", "-o", "%F|%k").splitlines():
        job_id, _, its_comment = line.partition("|")
        if its_comment == comment:
            return job_id
    return None


FINAL = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED",
)  # fmt: skip


def nodes(job_id: str) -> tuple[str, list[str]]:
    """Returns the id that srun takes, and the nodes of a job in the order of their ranks. A part of an array has its own id.

    Raises:
        UserError: the job runs on no node.
        Unreachable: the controller does not answer.
    """
    placed = output("squeue", "-h", "-j", job_id, "-o", "%A|%N")
    own, _, names = next(iter(placed.splitlines()), "").partition("|")
    if not re.fullmatch(r"\d+", own) or not names:
        raise UserError(f"the SLURM job {job_id} runs on no node: it has ended, or has not started")
    return own, output("scontrol", "show", "hostnames", names).split()


_NODES = r"([\w.-]+)(?:\[([\d,-]+)\]([\w.-]*))?"
"""One part of SLURM's list of nodes."""


def node_names(text: str) -> Iterator[str]:
    """Yields the nodes of SLURM's `node[01-03,7]`; none of another list, such as one with two ranges in a name."""
    if not re.fullmatch(rf"{_NODES}(?:,{_NODES})*", text):
        return
    for prefix, ranges, end in re.findall(rf"(?:^|,){_NODES}(?=,|$)", text):
        for first, last in re.findall(r"(\d{1,9})(?:-(\d{1,9}))?", ranges):
            yield from (f"{prefix}{number:0{len(first)}}{end}" for number in range(int(first), int(last or first) + 1))
        if not ranges:
            yield prefix


def by_rank(hosts: list[str], live: bool) -> list[str]:
    """Returns a job's nodes in the order of ranks. The launchers of a live job sort them by name, as text, after the first one."""
    return [*hosts[:1], *sorted(hosts[1:])] if live else hosts


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,12}", text) else 0


_END = TypeAdapter(Status)


def ended(folder: Path) -> Status | None:
    """Returns how the job has ended, from ended.json; None if this is not known yet."""
    try:
        return _END.validate_python(files.read_json(folder / ENDED))
    except ValueError:  # pydantic's
        return None


SETTLE_SECONDS = 60.0
"""Seconds in which SLURM may still requeue a job whose node failed, and a file may not be visible yet."""

UNKNOWN = JobInfo("", "")


def settled(record: SlurmJob, info: JobInfo) -> bool:
    """Returns whether the end of the job, or its submission, is so long ago that nothing changes any more."""
    return time.time() - (info.ended or record.since) >= SETTLE_SECONDS


def confirms(end: Status, record: SlurmJob, info: JobInfo) -> bool:
    """Returns whether SLURM knows nothing later than this end. By then every note is visible, also on a slow file system."""
    noted = max((node.restarts for node in end.ranks), default=0)
    return not info.state or (settled(record, info) and info.state in FINAL and info.restarts <= noted)


class Evidence:
    """All known facts about a job: from SLURM, from status.json, and from the notes of its tasks.

    Args:
        info: `UNKNOWN` if SLURM does not know the job, or does not answer.
        outage: whether SLURM does not answer. Then only the job's own files count: it has ended if they rule out a restart.
    """

    def __init__(self, record: SlurmJob, info: JobInfo, outage: bool) -> None:
        self.spec, self.info, self.outage = record.spec, info, outage
        notes = {task: TaskResult.read(path) for task, path in record.notes("", "_end.json").items()}
        results = {task: result for task, result in notes.items() if result is not None}
        self.restarts = max([info.restarts, *(result.restart for result in results.values())])
        # Ends of the tasks of the latest start, by rank (or by node of a live job).
        self.ends = {task: result for task, result in results.items() if result.restart == self.restarts}
        # Starts after which the job had saved and got further do not count against `max_restarts`.
        free = set(record.notes("saved_"))
        failures = self.restarts - sum(start < self.restarts for start in free)
        self.used_up = self.restarts not in free and failures >= self.spec.max_restarts
        reported = records.reported(Path(record.run_dir), record.job)
        # The end of an earlier start is not the end of this one. The launcher of a live job counts its own restarts.
        earlier = reported is not None and reported.code is not None and reported.restart not in (None, self.restarts)
        self.reported = None if earlier and not self.spec.live else reported
        self.cancelled = record.file("cancelled").exists()
        self.settled = settled(record, info)
        # Number of tasks that decide how the job has ended.
        self.tasks = 1 if self.spec.live else self.spec.nodes * self.spec.ranks
        self.code = self._code()
        # The job's own exit code, or SLURM's.
        self.last_code: int = self.code if self.code is not None else info.exit_code or 1

    def _code(self) -> int | None:
        """The job's own exit code: status.json takes precedence over the tasks' notes, and success needs all notes. None: not known."""
        spec, reported = self.spec, self.reported
        if reported is not None and reported.code is not None and spec.recipe is not None and not spec.live:
            return reported.code
        # The first node decides how a live job has ended: any other node may be lost.
        codes = [end.code for task, end in self.ends.items() if task == 0 or not spec.live]
        bad = [code for code in codes if code != EXIT_DONE]
        if bad:
            return next((code for code in (EXIT_USAGE, EXIT_PREEMPTED) if code in bad), bad[0])
        return EXIT_DONE if len(codes) >= self.tasks else None

    def cause(self) -> str:
        """Returns the failure that came first, not its consequences: a rank's own error before a lost collective."""
        failed = [end for end in self.ends.values() if end.code not in (EXIT_DONE, EXIT_PREEMPTED)]
        failed.sort(key=lambda end: (not end.reason, "did not arrive" in end.reason, end.time))
        if failed and failed[0].reason:
            return f"rank {failed[0].rank} on {failed[0].host}: {failed[0].reason}"
        if self.reported is not None and self.reported.code not in (None, EXIT_DONE) and self.reported.reason:
            return self.reported.reason
        whose = f"rank {failed[0].rank} on {failed[0].host}: " if failed else ""
        return f"{whose}exit code {failed[0].code if failed else self.last_code}"


_OF_NODES = {"NODE_FAIL": "a node failed", "BOOT_FAIL": "a node did not boot", "PREEMPTED": "preempted"}


def status_from_slurm(job: Evidence) -> Status:
    """Returns the status of a job. This function is pure."""
    state, reason, code = _classify(job)
    about = records.about_time(job.reported)
    return Status(state, reason, _parts(job, state), code, **about)


def _classify(job: Evidence) -> tuple[State, str, int | None]:
    """Returns state, reason and exit code."""
    info, code, reported = job.info, job.code, job.reported
    if info.state == "PENDING":
        return (*pending(info, job.restarts), None)
    decisive = code in (EXIT_DONE, EXIT_USAGE) or (code is not None and (job.used_up or job.cancelled))
    if job.outage and not decisive:
        if reported is None:
            return "pending", "no rank has reported", None
        return "running", records.step(reported), None
    if not info.state and code is None:
        if not job.settled:
            return "pending", "SLURM does not know it yet", None
        return "lost", "SLURM no longer knows the job, and it left no result", None
    held = info.state in ("REQUEUE_HOLD", "SPECIAL_EXIT")
    if held or info.state.startswith("REQUEUE"):
        next_start = f"is held: scontrol release {info.job_id}" if held else "SLURM starts it again"
        return "restarting", f"restart {job.restarts}: {next_start}", None
    if info.state and info.state not in FINAL:
        where = f" on {info.nodes}" if info.nodes else ""
        if info.state == "COMPLETING":
            return "running", f"is ending{where}{f', restart {job.restarts}' if job.restarts else ''}", None
        other = "" if info.state == "RUNNING" else f" ({info.state.lower()})"
        return "running", records.progress(reported, job.restarts, where, other), None
    return _classify_end(job)


def _classify_end(job: Evidence) -> tuple[State, str, int | None]:
    """Returns the result of `_classify` for a job that has ended. SLURM may start the job again."""
    info, code, reported = job.info, job.code, job.reported
    if code == EXIT_DONE:
        return "succeeded", (reported.reason if info.state and reported is not None else "") or "complete", code
    lost_node = _OF_NODES.get(info.state, "")
    if lost_node and info.nodes:
        lost_node += f" ({info.nodes})"
    if lost_node and info.requeue and not (job.used_up or job.settled or job.cancelled):
        return "restarting", f"{lost_node}: SLURM starts it again", None
    if info.state == "COMPLETED":
        missing = sorted(set(range(job.tasks)) - set(job.ends))
        ranks = f"rank {missing[0]}" if len(missing) == 1 else "ranks " + ", ".join(map(str, missing[:8]))
        if not job.settled:
            return "running", f"has ended; the results of {ranks} are not visible yet", None
        return "failed", f"SLURM says COMPLETED, but {ranks} left no result", 1
    saved = "; the state is saved" if code == EXIT_PREEMPTED else ""
    if info.state == "TIMEOUT":
        return "timed_out", f"the time limit of {job.spec.time_limit} is over{saved}", EXIT_TIMED_OUT
    ended_from_outside = info.state in ("CANCELLED", "REVOKED")
    if ended_from_outside and not job.cancelled and (never := pending(info))[0] == "unschedulable":
        return "failed", never[1], 1  # SLURM has removed the job, which could not start
    if ended_from_outside or job.cancelled:
        return "cancelled", f"cancelled{saved}", code
    if info.state == "PREEMPTED":
        return "preempted", "preempted, and not started again: submit it again to resume", EXIT_PREEMPTED
    if info.state == "OUT_OF_MEMORY":
        return "failed", "was killed for memory: raise memory, or lower the batch size", 1
    if lost_node:
        spent = " (max_restarts is used up)" if job.used_up else ""
        return "lost", f"{lost_node}, and the job was not started again{spent}", None
    if job.last_code == EXIT_PREEMPTED:
        spent = f"all {job.spec.max_restarts} restarts are used up, by failures or by starts that made no progress"
        why = spent if job.used_up else "it was not requeued"
        return "preempted", f"saved, and {why}: submit it again to resume", EXIT_PREEMPTED
    return "failed", job.cause(), job.last_code


def _parts(job: Evidence, state: State) -> list[NodeStatus]:
    spec = job.spec
    hosts = by_rank(list(itertools.islice(node_names(job.info.nodes), spec.nodes)), spec.live)
    return [
        NodeStatus(
            hosts[node] if node < len(hosts) else f"node {node}",
            list(range(node * spec.ranks, (node + 1) * spec.ranks)), state, "", job.restarts,
        )
        for node in range(spec.nodes)
    ]  # fmt: skip


_REASONS: tuple[tuple[str, State, str], ...] = (
    ("Priority", "queued", "waits behind jobs of higher priority in partition {partition}"),
    ("Resources", "pending", "waits for nodes to be free in partition {partition}"),
    ("BeginTime", "pending", "waits for its start time"),
    ("Dependency", "pending", "waits for the job that it depends on"),
    ("DependencyNeverSatisfied", "unschedulable", "the job that it depends on has failed: see its logs, then submit again"),
    ("JobHeldUser", "pending", "is held: scontrol release {job}"),
    ("JobHeldAdmin", "pending", "is held by an administrator: ask why"),
    ("JobHoldMaxRequeue", "unschedulable", "was requeued more often than the cluster allows, and is held"),
    ("Reservation", "pending", "waits for its reservation"),
    ("Licenses", "pending", "waits for a licence"),
    ("ReqNodeNotAvail|Nodes_required_for_job_are_DOWN.*", "pending", "nodes that it needs are down, drained or reserved"),
    ("PartitionDown", "pending", "partition {partition} is down"),
    ("PartitionInactive", "pending", "partition {partition} is inactive"),
    ("PartitionNodeLimit", "unschedulable", "asks for more nodes than partition {partition} has or allows: lower nodes"),
    ("PartitionTimeLimit", "unschedulable", "time_limit is above the limit of partition {partition}: lower it"),
    ("PartitionConfig", "unschedulable", "partition {partition} does not allow such a job"),
    ("BadConstraints", "unschedulable", "no node has what constraint asks for"),
    ("AccountNotAllowed", "unschedulable", "the account may not use partition {partition}: set slurm.account"),
    ("QOSNotAllowed", "unschedulable", "the QOS may not use partition {partition}: set slurm.qos"),
    ("InvalidAccount", "unschedulable", "the account does not exist, or you are not in it: set slurm.account"),
    ("InvalidQOS", "unschedulable", "the QOS does not exist, or you may not use it: set slurm.qos"),
    ("NodeDown", "restarting", "a node that it ran on is down"),
    ("Cleaning", "restarting", "its last start is still being cleaned up"),
    ("Prolog", "pending", "the nodes run their prolog"),
    (".*launch_failed.*", "unschedulable", "its start failed on a node and it is held: scontrol release {job}, or see the node's log"),
    (r"AssocMax\w*Per(Job|Node)(Limit)?", "unschedulable", "is above a limit of your account's association ({name}): ask for less"),
    (r"QOSMax\w*Per(Job|Node)(Limit)?", "unschedulable", "is above a limit of the QOS ({name}): ask for less"),
    (r"Assoc\w*", "queued", "waits: a limit of your account's association is reached ({name})"),
    (r"QOS\w*", "queued", "waits: a limit of the QOS is reached ({name})"),
    (".+", "pending", "{words}"),
    ("", "pending", "waits for the scheduler"),
)  # fmt: skip
"""(pattern, state, sentence) of a waiting job. The first row whose pattern matches SLURM's reason counts."""


def pending(info: JobInfo, restarts: int = 0) -> tuple[State, str]:
    """Returns state and sentence for a waiting job. `restarts` above 0: the job has run before."""
    name = re.split(r"[(,]", info.reason)[0]
    state, text = next((state, text) for pattern, state, text in _REASONS if re.fullmatch(pattern, name))
    text = text.format(partition=info.partition or "?", job=info.job_id, name=name, words=name.replace("_", " "))
    return (
        ("restarting", f"restart {restarts}: {text}") if restarts and state in ("pending", "queued") else (state, text)
    )
