"""Keeps the signals that reach launchers and ranks while these start.

A recipe inherits a mask, and takes the pending signals when it is ready (`lockstep.training.__main__`). A user's program may never
open a Session, so it inherits no mask. Its parent holds back the signals that it forwards (`PendingSignals`), until the program
catches signals, or has had time for that. From `import lockstep` on the program itself keeps signals for its Session
(`keep_for_session`). Imports nothing heavy: it runs before torch is loaded.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.training.contract import ENV_LAUNCHER
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


_before: dict[int, Any] = {}
"""Signal → the handler that `_keep` replaces."""
_came: dict[int, float] = {}
_ending = _thread.allocate_lock()
"""A lock, so that signals end the process in the order of their arrival: the launcher answers the first with its own signal."""
_no_session = threading.Event()
"""Set if there is no Session to wait for, and the main thread, which alone can restore handlers, has not done so."""


def keep_for_session(env: Mapping[str, str]) -> None:
    """Keeps later signals for the Session, in a rank that Lockstep's launcher or SLURM's task has started."""
    if not _launched(env) or threading.current_thread() is not threading.main_thread():
        return
    for number in sorted(FORWARDED, key=signal.SIGTERM.__eq__):  # TERM last: who catches it catches all (`starting`)
        if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
            _before[number] = handler
            signal.signal(number, _keep)
    os.register_at_fork(after_in_child=lambda: taken({}))  # what came was for its parent


def _launched(env: Mapping[str, str]) -> bool:
    """Returns whether the launcher that started this process is still its parent."""
    return env.get(ENV_LAUNCHER) == str(os.getppid())


def taken(replaced: dict[int, Any]) -> list[int]:
    """Restores the handlers, in the main thread, and returns the signals that have come, which the caller must handle.

    Args:
        replaced: handlers that the caller has replaced. In place of our handler, the function enters the handler before it.
    """
    for number, handler in list(_before.items()):
        if replaced.get(number) is _keep:
            replaced[number] = handler
        elif signal.getsignal(number) is _keep:
            signal.signal(number, handler)
    came = list(_came)  # from here on there are no more
    _before.clear()
    _came.clear()
    return came


def give_back() -> None:
    """Delivers the kept signals now, for a program that handles signals itself."""
    if threading.current_thread() is threading.main_thread():
        for one in taken({}):
            signal.raise_signal(one)
    elif _before:
        _no_session.set()
        for one in list(_came):
            os.kill(os.getpid(), one)


def _keep(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the handler's signature
    now = time.monotonic()
    if _no_session.is_set() or now - _came.get(number, now) > ONE_SIGNAL_SECONDS:
        give_back()
        signal.raise_signal(number)
    elif number not in _came:
        _came[number] = now
        # Not `threading`: its locks may be held by what this handler interrupts.
        _thread.start_new_thread(_end_without_session, ())


def _end_without_session() -> None:
    time.sleep(HOLD_SECONDS)
    with _ending:
        for one, came in list(_came.items()):
            if time.monotonic() - came >= HOLD_SECONDS and _came.pop(one, None) is not None:
                _end_by(one)


def _end_by(number: int) -> None:
    import ctypes  # only for the ranks: it takes its time

    if signal.getsignal(number) is _keep:  # else the program has its own handler by now
        # The default. Python's own call works in the main thread only, which may be busy.
        ctypes.CDLL(None).signal(number, 0)
    if "TORCHELASTIC_RUN_ID" in os.environ and _launched(os.environ):
        # The launcher gets the signal first, and restarts no rank: the signal may have reached this rank alone. SLURM's task gets none.
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)
