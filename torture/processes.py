"""The processes of a job that is tortured, whatever starts them: they carry a mark in their environment. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.training.contract import ENV_TORTURE, OF_A_JOB, RANK_NAMES
from lockstep.wire.progress import stat_of, variables_of

_OF_A_LAUNCHER = {*OF_A_JOB, *RANK_NAMES, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Process:
    pid: int
    began: int
    """Clock ticks from the machine's start to the process's. A later process with the same id has another value."""
    parent: int
    rank: str
    """Rank from the environment, which children inherit; empty if no launcher set one."""
    words: str
    """Command line of the process."""

    def send(self, number: int) -> None:
        """Sends a signal, if the process still exists, and is this one."""
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(self.pid)
            try:
                found = _stat(self.pid)
                if found is not None and found[1] == self.began:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def environment(mark: str, temporary: Path) -> dict[str, str]:
    """Returns the environment for a job with the mark: this process's own, without variables of an outer job."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    return {**kept, ENV_TORTURE: mark, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}


def living(mark: str, session: int) -> list[Process]:
    """Returns the processes that carry the mark or belong to the session. Leaves out zombies."""
    found = []
    for entry in os.listdir("/proc"):
        stat = _stat(int(entry)) if entry.isdigit() else None
        if stat is None:
            continue
        env = variables_of(int(entry))
        if env.get(ENV_TORTURE) == mark or stat[2] == session:
            words = ""
            with contextlib.suppress(OSError):
                words = (
                    Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            rank = next((env[name] for name in RANK_NAMES if name in env), "")
            found.append(Process(int(entry), stat[1], stat[0], rank, words))
    return found


def _stat(pid: int) -> tuple[int, int, int] | None:
    """Returns (parent, began, session) of a process; None if it has ended."""
    fields = stat_of(pid)
    return None if not fields or fields[0] in "ZX" else (int(fields[1]), int(fields[19]), int(fields[3]))


def ranks_of(living: list[Process], launcher: int) -> list[Process]:
    """Returns the first process of each rank, seen from the launcher, in the order of ranks; for a job without ranks the launcher."""
    by_pid = {one.pid: one for one in living}
    found = [one for one in living if one.rank and (one.parent not in by_pid or by_pid[one.parent].rank != one.rank)]
    return sorted(found, key=lambda one: (len(one.rank), one.rank)) or [one for one in living if one.pid == launcher]


def end(mark: str, session: int) -> list[Process]:
    """Kills the remaining processes, and waits for their ends, for ten seconds at most. Returns the processes that remained at first."""
    left = first = living(mark, session)
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        for one in left:
            one.send(signal.SIGKILL)
        time.sleep(0.01)
        left = living(mark, session)
    return first
