"""Keeps the signals that reach launchers and ranks while these start.

A recipe inherits a mask, and takes the pending signals when it is ready (`lockstep.training.__main__`). A user's program may never
open a Session, so it inherits no mask. Its parent holds back the signals that it forwards (`PendingSignals`), until the program
catches signals, or has had time for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.training.limits import HOLD_SECONDS, ONE_SIGNAL_SECONDS

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that the launcher forwards to its ranks."""


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Blocks the signals during the block. A program that replaces this process in the block gets the pending signals."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def starting(pid: int, number: int) -> bool:
    """Returns whether the process is a Python program that does not handle this signal so far. Python always catches INT. Only Linux shows
    the handlers of a process; elsewhere no signal is held back."""
    about = Path(f"/proc/{pid}")
    try:
        if "python" not in os.path.basename(os.readlink(about / "exe")):
            return False
        status = dict(line.partition(":\t")[::2] for line in (about / "status").read_text().splitlines())
        handled = int(status["SigCgt"], 16) | int(status["SigBlk"], 16) | int(status["SigIgn"], 16)
    except (OSError, KeyError, ValueError):
        return False
    return not any(handled >> (one - 1) & 1 for one in {number, signal.SIGTERM} - {signal.SIGINT})


class PendingSignals:
    """The pending signals for one start of some ranks.

    Args:
        grace: seconds that a rank has after a signal; half of them remain for saving.
    """

    # A handler calls `send` at any moment, also while one of these methods runs: they iterate over copies.
    def __init__(self, grace: float = 2 * HOLD_SECONDS) -> None:
        self._until = time.monotonic() + min(HOLD_SECONDS, grace / 2)
        self._waiting: dict[tuple[int, int], float] = {}
        """(process, signal) → its time."""
        self._missed: set[int] = set()
        """Signals that came while no rank was running."""
        self._gone: set[int] = set()
        """Signals that found a rank gone already: all ranks may be about to restart."""
        self.delivered: set[int] = set()

    def send(self, pids: Iterable[int], number: int) -> None:
        """Forwards a signal to processes that can handle it, and keeps it for the others; without a process, for the next start."""
        now, pids = time.monotonic(), list(pids)
        if not pids:
            self._missed.add(number)
        if any(now - came > ONE_SIGNAL_SECONDS for (_, one), came in list(self._waiting.items()) if one == number):
            self._until = now
        for pid in pids:
            if number != signal.SIGKILL and now < self._until and starting(pid, number):
                self._waiting.setdefault((pid, number), now)
            else:
                self._deliver(pid, number)
        self._release()

    def release(self, pids: Iterable[int]) -> bool:
        """Forwards signals that need not wait any more. Returns whether a signal still waits. The caller repeats the call."""
        pids = list(pids)
        while pids and self._missed:
            self.send(pids, self._missed.pop())
        self._release()
        return bool(self._waiting)

    def _release(self) -> None:
        for pid, number in list(self._waiting):
            ready = time.monotonic() >= self._until or not starting(pid, number)
            if ready and self._waiting.pop((pid, number), None) is not None:  # a handler may have been here meanwhile
                self._deliver(pid, number)

    def _deliver(self, pid: int, number: int) -> None:
        self.delivered.add(number)
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self._gone.add(number)

    def ending(self, codes: Iterable[int]) -> int | None:
        """Returns the signal that has ended these ranks (exit codes in Python's form), or that a rank had not got when it ended."""
        ended = next((-code for code in codes if -code in self.delivered), None)
        return ended or next((number for _, number in list(self._waiting)), None)

    def inherit(self, earlier: PendingSignals) -> None:
        """Takes over the signals that the ranks of an earlier start have not got."""
        self._missed |= {number for _, number in list(earlier._waiting)} | earlier._missed | earlier._gone
