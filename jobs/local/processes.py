"""The processes of a job on this machine: which they are, whether they live, and their end (Linux).

Three things tie a process to its job. Its environment names the job, which a program may clear. It descends from the
launcher, also in a session of its own. And where its parent ends, it becomes a child of the job's supervisor instead
of init's (`adopt_orphans`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.training import contract

SUPERVISOR = "lockstep.jobs.local.supervise"
"""The module that supervises a job, as it stands in the command line of its process."""
POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""How long after a KILL a process is waited for. What the kernel holds longer (state D) may take for ever."""
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends is a child of this process, which must collect it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: tells it from a later one with the same id (Linux)."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def alive(pid: int, ticks: int | None) -> bool:
    """Whether that very process still runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    fields = _stat(pid)
    if fields[:1] == ["Z"]:  # ended; only nobody has asked for its exit code yet
        return False
    return ticks is None or start_ticks(pid) == ticks


@dataclass(frozen=True)
class _Look:
    """All processes at one moment."""

    states: dict[int, str]
    children: dict[int, list[int]]
    jobs: dict[str, list[int]]
    """By the job that their environment names."""

    @classmethod
    def take(cls) -> _Look:
        found = cls({}, {}, {})
        for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
            fields = _stat(int(entry)) if entry.isdigit() else []
            if fields:
                pid = int(entry)
                found.states[pid] = fields[0]
                found.children.setdefault(int(fields[1]), []).append(pid)
                if job := _job(pid):
                    found.jobs.setdefault(job, []).append(pid)
        return found


class Looks:
    """Two looks at all processes, each taken when it is first asked for: for questions about many jobs at once."""

    def __init__(self) -> None:
        self._taken: list[_Look] = []

    def __iter__(self) -> Iterator[_Look]:
        for number in range(2):
            if len(self._taken) == number:
                self._taken.append(_Look.take())
            yield self._taken[number]


def living(job: str, *ancestors: int, looks: Looks | None = None) -> list[int]:
    """The processes of a job: who has its identity in the environment, and who descends from these or from `ancestors`.

    Neither this process nor `ancestors` themselves, and no other job that one of them has submitted.
    """
    # A process that forks and ends while /proc is being read may be missed with its child, but not twice.
    return next((found for look in looks or Looks() if (found := _of(look, job, ancestors))), [])


def _of(look: _Look, job: str, ancestors: Sequence[int]) -> list[int]:
    found = [*ancestors, *look.jobs.get(job, ())]
    for pid in found:  # grows while it is read
        found += [child for child in look.children.get(pid, ()) if child not in found and not _another_job(child, job)]
    apart = {os.getpid(), *ancestors}
    return [pid for pid in dict.fromkeys(found) if look.states.get(pid, "Z") != "Z" and pid not in apart]


def _job(pid: int) -> str:
    """The job that a process's environment names; "" where it names none, or is another user's."""
    return contract.variables_of(pid).get(contract.ENV_JOB, "")


def _another_job(pid: int, job: str) -> bool:
    return _job(pid) not in ("", job) or SUPERVISOR.encode() in _read(pid, "cmdline").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill(job: str, *ancestors: int) -> None:
    """KILL until nobody of the job lives, for `KILL_SECONDS` at most."""
    deadline = time.monotonic() + KILL_SECONDS
    while (rest := living(job, *ancestors)) and time.monotonic() < deadline:
        send(rest, signal.SIGKILL)  # in every round: they may fork between the look and the signal
        time.sleep(POLL_SECONDS)


def described(pids: Sequence[int]) -> str:
    """`process 123 (python3, state D)`, of those that still live."""
    told = []
    for pid in pids:
        name, state = _read(pid, "comm").decode(errors="replace").strip(), _stat(pid)[:1]
        if state:
            told.append(f"process {pid} ({name}, state {state[0]})")
    return ", ".join(told[:8])
