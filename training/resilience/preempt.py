"""Ending early, together: signal → flag → consensus, one step later.

A signal handler only sets a flag. At every boundary (step, evaluation batch) the flags of all ranks are reduced in an
asynchronous all-reduce, whose result is read at the *next* boundary, when it has long arrived: it costs nothing, and
every rank leaves at the same boundary even where one alone saw the signal.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.wire.signals import FORWARDED, taken

from ..contract import EXIT_PREEMPTED, to_stderr
from ..limits import LAST_WORDS_SECONDS, ONE_SIGNAL_SECONDS
from ..parallel.exchange import all_reduce
from ..parallel.world import World


class Signals:
    """Catches the signals that ask for an early end. The second one, later, ends the process at once.

    Python runs signal handlers between bytecodes only, so a rank that waits in a collective would not see its signal
    until the collective ends. The C handler writes the number into a pipe at once, and a thread reads it there.
    """

    def __init__(self, names: Sequence[str], now: Callable[[], float] = time.monotonic, meeting: bool = False) -> None:
        self.received: str | None = None
        self.on_second_signal: Callable[[int], None] | None = None
        """Called with the exit code before the second signal ends the process, in a thread of its own."""
        self.meeting = meeting
        """Until the ranks have met there is nothing to save or to agree on: a signal ends the process at once."""
        self.since = math.inf
        """When the first one came (`time.monotonic`); infinite: none has."""
        self._now = now
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        numbers = [signal.Signals[f"SIG{name}"] for name in names]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: the run is to outlive its terminal
            numbers = [number for number in numbers if number != signal.SIGHUP]
        self._before_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self.replaced: dict[int, Any] = {number: signal.signal(number, _nothing) for number in numbers}
        """The handlers that were there."""
        came = taken(self.replaced)  # while the program was starting
        os.register_at_fork(after_in_child=self._in_child)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        # Whoever started us may have held signals back, so that none is lost while torch is being imported.
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        for one in came:
            signal.raise_signal(one)

    def _watch(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                if number in self.replaced:
                    self._note(number)
        os.close(self._read)

    def _note(self, number: int) -> None:
        if self.meeting:
            to_stderr(f"{signal.Signals(number).name} before the ranks were connected: run the same command again")
            self._leave(EXIT_PREEMPTED)
        elif self.received is None:
            self.since, self.received = self._now(), signal.Signals(number).name
        elif self._now() - self.since > ONE_SIGNAL_SECONDS:
            self._leave(128 + number)

    def _leave(self, code: int) -> None:
        if self.on_second_signal is not None:
            thread = threading.Thread(target=self.on_second_signal, args=(code,), daemon=True)
            thread.start()
            thread.join(LAST_WORDS_SECONDS)  # a file system that hangs may be why somebody insists
        os._exit(code)

    def _in_child(self) -> None:
        """A forked child (a data loader of the user's own) does not save on a signal, and does not report it to the parent.

        It holds no end of the pipe either: `restore` waits for the end of what can be read there.
        """
        if self._write >= 0:
            signal.set_wakeup_fd(-1)
            for number in self.replaced:
                signal.signal(number, signal.SIG_DFL)
            os.close(self._read)
            os.close(self._write)
            self._write = -1

    def ignore(self) -> None:
        """From here on nothing is left to save: a launcher's parting TERM must not change the exit code."""
        for number in self.replaced:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Restores the earlier signal handlers and the earlier signal mask."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self.replaced.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._write = -1
        self._thread.join()


def _nothing(number: int, frame: FrameType | None) -> None:
    """In place of the default action; the pipe carries the number."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks agreed on at one boundary."""

    stop: bool = False
    save: bool = False
    best: bool = False
    """The weights of this boundary have the best score so far."""
    final: bool = False
    """The run is over: some rank has called `stop`."""
    admit: bool = False
    """Replacements of lost ranks wait."""


_STOP, _SAVE, _BEST, _NONE, _FINAL, _ADMIT = 1, 2, 4, 8, 16, 32
_FLAGS = 6
"""Bits of these wishes; a fingerprint of 56 bits is behind them."""
_MASK = (1 << 56) - 1


class Consensus:
    """Collects the wishes of all ranks.

    Args:
        signals: what the process received; None where the embedding script keeps its own handlers.
    """

    def __init__(self, world: World, signals: Signals | None) -> None:
        self.world, self.signals = world, signals
        self.reason: str | None = None
        self.final: str | None = None
        """Why the script ends the run for good, on this rank."""
        self.fingerprint = 0
        """A digest of this rank's replica or learning rates. The next `poll` compares it with the others' and forgets it. 0: none."""
        self.replicas_differ = False
        """Whether one was not the same on all ranks, as far as the results have been read."""
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self.some_without_score = False
        """A best score was given by some ranks only, so the ranks could not save its weights together."""

    def _wants_stop(self) -> bool:
        received, live = self.signals.received if self.signals is not None else None, self.world.live
        if self.reason is None and received and (live is None or live.ends(received)):
            self.reason = f"{received} on rank {self.world.rank}"
        return self.reason is not None

    def poll(self, save_due: bool = False, score: bool | None = None) -> Decision:
        """Call at the same boundaries on every rank. What is due now is decided by the next call, but for a score.

        Args:
            score: whether a score that has come since the last call is the best so far, in which rank 0 is believed; None:
                none has come. A score belongs to the weights of this boundary, so the ranks that were given one wait for the
                others here. Where one was not, no rank saves: it does not wait, and knows of it only at its next call.
        """
        mine, self.fingerprint = self.fingerprint, 0
        best, none = bool(score) and self.world.leader, score is None
        stop = self._wants_stop()
        admit = self.world.live is not None and self.world.leader and self.world.live.wanted
        if self.world.size == 1:
            return Decision(stop, save_due, best, self.final is not None, admit)
        flags = stop * _STOP | save_due * _SAVE | best * _BEST | none * _NONE | (self.final is not None) * _FINAL
        flags |= admit * _ADMIT
        # Two numbers: with more of them, gloo's messages grow with the square of the ranks.
        wishes = torch.tensor([flags | mine << _FLAGS, ~mine & _MASK if mine else 0])
        if self.world.live is not None:
            return self._agreed_now(wishes, score)
        before, self._pending = self._pending, None
        work = dist.all_reduce(wishes, dist.ReduceOp.BOR, async_op=True)
        assert work is not None
        self._pending = (wishes, work)
        if score is not None:
            work.wait()
            wished = int(wishes[0])
            best = bool(wished & _BEST) and not wished & _NONE
            self.some_without_score |= bool(wished & _BEST) and bool(wished & _NONE)
        wished = 0 if before is None else self._read(before)
        return Decision(bool(wished & _STOP), bool(wished & _SAVE), best, bool(wished & _FINAL))

    def _agreed_now(self, wishes: torch.Tensor, score: bool | None) -> Decision:
        """Where a rank may be lost, nothing stays under way from one boundary to the next."""
        pair = all_reduce(wishes, self.world, torch.bitwise_or)
        wished = int(pair[0])
        self.replicas_differ |= bool(wished >> _FLAGS & int(pair[1]))
        best = bool(wished & _BEST) and not wished & _NONE
        self.some_without_score |= score is not None and bool(wished & _BEST) and bool(wished & _NONE)
        return Decision(bool(wished & _STOP), bool(wished & _SAVE), best, bool(wished & _FINAL), bool(wished & _ADMIT))

    def _read(self, pending: tuple[torch.Tensor, dist.Work]) -> int:
        pending[1].wait()
        wished, complement = pending[0].tolist()
        self.replicas_differ |= bool(wished >> _FLAGS & complement)  # a bit that is set on one rank and not on another
        return int(wished)

    def look(self) -> bool:
        """`replicas_differ`, with what is under way, which the next `poll` gives all the same."""
        if self._pending is not None:
            self._read(self._pending)
        return self.replicas_differ

    def settle(self) -> None:
        """Waits for the reduction under way. Every rank calls it before leaving a loop of polls."""
        self.look()
        self._pending = None
