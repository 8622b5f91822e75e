"""What SLURM says about a job: the controller first (live, needs no accounting), then its history (sacct).

Never what submitit cached: it calls a requeued job done, and keeps that for good.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from lockstep.jobs.slurm.transport.base import SECONDS, Told, Transport
from lockstep.jobs.status import Unreachable
from lockstep.training.contract import UserError

UNKNOWN_JOB = re.compile(r"invalid job id|jobs? (\S+ )?not found|does not exist", re.I)
NO_CONTACT = re.compile(r"unable to contact|timed out|zero bytes|connection refused|standby mode", re.I)
"""What SLURM's commands say where they had no answer, and not one that is a refusal."""
NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.I)


@dataclass(frozen=True, slots=True)
class Found:
    """One job as SLURM knows it. `ended` is seconds since the epoch, None while it is under way."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    exit_code: int = 0
    nodes: str = ""
    partition: str = ""
    requeue: bool = True
    ended: float | None = None
    name: str = ""
    comment: str = ""


class Forgotten(Unreachable):
    """The accounting does not answer, which alone would know how a job ended that the controller has forgotten."""


def ask(transport: Transport, *command: str, seconds: float = SECONDS) -> Told:
    """Runs a SLURM command. Raises `UserError` where it is not installed, `Unreachable` where it does not end."""
    return transport.run(*command, seconds=seconds, env={"SLURM_TIME_FORMAT": "%s"})


def answer(transport: Transport, *command: str) -> str:
    """What a SLURM command prints; nothing for a job that it does not know. Raises `Unreachable` for any other failure."""
    told = ask(transport, *command)
    if told.returncode != 0 and not unknown(told):
        raise silent(told)
    return told.stdout


def order(transport: Transport, *command: str) -> bool:
    """Whether SLURM does it: a job that has just ended, or is in another state, is no failure. Raises `Unreachable`."""
    told = ask(transport, *command)
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


def look(transport: Transport, job_id: str) -> Found | None:
    """The job; None where neither the controller nor the accounting knows it. Raises `Unreachable`, `Forgotten`."""
    shown = ask(transport, "scontrol", "show", "job", "-o", job_id)
    if shown.returncode == 0:
        found = [job for line in shown.stdout.splitlines() if (job := read(line)) is not None]
        if found:
            return found[0]
    try:
        past = history(transport, job_id)
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


def read(line: str) -> Found | None:
    """One line of `scontrol show job -o`."""

    def value(name: str) -> str:
        match = re.search(rf"(?:^|\s){name}=(\S*)", line)
        return "" if match is None or match[1] in ("(null)", "None") else match[1]

    if not value("JobId"):
        return None
    element = value("ArrayTaskId")
    job_id = f"{value('ArrayJobId')}_{element}" if element.isdigit() else value("JobId")
    state = value("JobState")
    return Found(
        job_id, state, value("Reason"), _number(value("Restarts")), _number(value("ExitCode").split(":")[0]),
        value("NodeList"), value("Partition"), value("Requeue") != "0",
        _number(value("EndTime")) or None if final(state) else None, value("JobName"), value("Comment"),
    )  # fmt: skip


def history(transport: Transport, job_id: str) -> Found | None:
    """What the accounting remembers; None without accounting, or where it has not heard of the job yet. Raises `Forgotten`."""
    try:
        told = ask(transport, "sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode,NodeList,Partition,End")
    except UserError as error:
        if isinstance(error, Unreachable):
            raise Forgotten(str(error)) from None
        return None
    if told.returncode != 0 and not NO_ACCOUNTING.search(told.stderr):
        raise Forgotten(
            f"the SLURM accounting does not answer: {one_line(told.stderr) or f'exit code {told.returncode}'}"
        )
    if told.returncode != 0 or not told.stdout.strip():
        return None
    state, code, nodes, partition, end = (told.stdout.strip().splitlines()[-1].split("|") + [""] * 5)[:5]
    state = state.split(" ")[0]  # CANCELLED by 1000
    ended = (_number(end) or time.time()) if final(state) else None
    return Found(job_id, state, "", 0, _number(code.split(":")[0]), nodes, partition, True, ended)


def mine(transport: Transport, name: str, comment: str) -> str | None:
    """The id of a job (or array) of this user with that name and comment: one whose answer to sbatch was lost.

    Raises:
        Unreachable: it may be there.
    """
    for line in answer(transport, "squeue", "-h", "--me", "-n", name, "-t", "all", "-o", "%F|%k").splitlines():
        job_id, _, said = line.partition("|")
        if said == comment:
            return job_id
    return None


def under_way(transport: Transport) -> set[str]:
    """The ids of this user's jobs and arrays that wait or run. Raises `Unreachable`."""
    return set(answer(transport, "squeue", "-h", "--me", "-o", "%F").split())


FINAL = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED",
)  # fmt: skip


def final(state: str) -> bool:
    return state in FINAL


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,12}", text) else 0
