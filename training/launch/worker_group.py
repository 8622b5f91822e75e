"""What the launchers of all nodes have in common (`coordinator.py`, `node_agent.py`): the signals that they hand on to their ranks, the
limits of time, and what is said and done when the ranks have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep.wire.hangs import Hangs
from lockstep.wire.signals import FORWARDED, PendingSignals

from ..contract import (
    ENV_NOTE,
    ENV_RESTARTS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    named,
    to_stderr,
)
from .ending import FINAL, Attempts, deaths, note_end, too_early


class Interrupted(Exception):
    """A signal ends the launcher while no rank runs."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


class WorkerGroup:
    """Its ranks.

    Args:
        job_id: the same on all nodes.
        live: ranks and nodes may be lost.
        lost_seconds: a node that is not heard of is lost after this time, with `live` also a rank that stands stopped.
        ours: the ranks are `python -m lockstep.training run`, which saves on a signal; else a program of which nothing is known.
        caught: without signals that the launcher ignores (nohup): the ranks ignore them, too.
        time_limit: in seconds; 0: none.
        hangs: looks for ranks that get no further.
    """

    def __init__(
        self, attempts: Attempts, *, job_id: str, live: bool, lost_seconds: int, grace: int, ours: bool,
        caught: tuple[signal.Signals, ...], time_limit: int, hangs: Hangs,
    ) -> None:  # fmt: skip
        self.job_id, self.live, self.lost_seconds = job_id, live, lost_seconds
        self.attempts, self.grace, self.ours, self.caught = attempts, grace, ours, caught
        self.time_limit, self.hangs = time_limit, hangs
        self.signalled: int | None = None
        self.timed_out = False
        self.held = PendingSignals()
        """Signals for ranks that are starting."""
        self.overdue: set[int] = set()
        """Ranks that the launcher has killed because the grace was over."""
        self.of_lost_nodes: dict[int, str] = {}
        """Ranks that were lost with their nodes: a sentence about that."""
        self._why: list[str] = []
        """How ranks have failed, a sentence for each way."""
        self.again = ""
        """" again" after the first start."""
        self.starts = attempts.used
        """How often the ranks were started before, by this launcher or one that it replaced."""

    def _pids(self) -> list[int]:
        """Of the ranks that run."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Around a start of the ranks."""
        os.environ[ENV_RESTARTS] = str(self.starts)
        self.again = " again"
        self.starts += 1  # a change of membership counts here, and not as a restart
        earlier, self.held = self.held, PendingSignals(self.grace)  # from here on it takes what comes
        self.held.inherit(earlier)
        # Ours take signals from the moment they catch them, and inherit that they wait until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED if self.ours else ())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def catch(self) -> None:
        handle(self.caught, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self._ends(number):
            self._begin_grace(number)
        self.held.send(self._pids(), number)  # without one, for the ranks that start next

    def _begin_grace(self, number: int) -> None:
        """The ranks have this long from the first signal on."""
        if self.signalled is None:
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, self.grace)
        self.signalled = number

    def _ends(self, number: int) -> bool:
        """Whether ranks end at this signal: what a program does with a USR1 is its own."""
        return self.ours or number in (signal.SIGTERM, signal.SIGINT)

    def limit(self, began: float) -> None:
        """Ends the ranks when the time limit, counted from then, is over, as TERM does."""
        signal.signal(signal.SIGALRM, self._over)
        left = max(0.001, self.time_limit - (time.monotonic() - began)) if self.time_limit else 0
        signal.setitimer(signal.ITIMER_REAL, left)

    def _over(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        self.timed_out = True
        self._forward(signal.SIGTERM, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """The grace is over: who still runs is killed. Again and again: a rank may just be starting."""
        signal.setitimer(signal.ITIMER_REAL, 1)
        if pids := self._pids():
            self.held.send(pids, signal.SIGKILL)

    def _start_again(self, codes: Mapping[int, int], failed: Container[int], left: int) -> bool:
        """Says how ranks have failed, and whether all start again: not where that was final, or a signal has ended them.

        Args:
            codes: rank → exit code, of all that failed.
            failed: those that had failed when the launcher was about to end the others.
            left: restarts that are left.
        """
        if self.signalled is None:
            self.signalled = self.held.ending(codes.values())  # one that no rank has used for itself
        overdue = {rank for rank in self.overdue if codes.get(rank) == -signal.SIGKILL}
        others = {rank: code for rank, code in codes.items() if rank not in overdue and rank not in self.of_lost_nodes}
        killed = f"the launcher killed rank {named(sorted(overdue))}: the grace of {self.grace} s was over"
        with_nodes = sorted({self.of_lost_nodes[rank] for rank in codes if rank in self.of_lost_nodes})
        self._why = [killed] * bool(overdue) + with_nodes + deaths(others, self.signalled, failed, self.ours)
        for line in self._why:
            to_stderr(f"launch: {line}")
        if not self.ours and (name := too_early(codes, self.signalled)):
            to_stderr(f"launch: the ranks were ended by {name}, which they did not catch")
        again = left > 0 and self.signalled is None and set(FINAL).isdisjoint(codes.values())
        if again:
            to_stderr(f"launch: all ranks start again; restarts left after that: {left - 1}")
        return again

    def settled(self, code: int, codes: Mapping[int, int]) -> int:
        """The exit code, where the ranks ended like that: a signal changes nothing any more.

        Args:
            code: of the ranks together.
            codes: rank → its own, of those that failed.
        """
        handle(self.caught, signal.SIG_IGN)
        if self.ours and code == EXIT_FAILED and (name := too_early(codes, self.signalled)):
            to_stderr(f"launch: {name} before any rank had started")
            code = EXIT_PREEMPTED
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.timed_out and code not in (EXIT_DONE, EXIT_USAGE):
            to_stderr(f"launch: the time limit of {self.time_limit} s is over")
            code = EXIT_TIMED_OUT
        if code != EXIT_DONE:
            self.note(code, "; ".join(self._why) or f"the ranks ended with exit code {code}")
        return code

    def note(self, code: int, reason: str) -> None:
        """Completes status.json of the run, where rank 0 could not."""
        note_end(Path(os.environ[ENV_NOTE]), code, reason)


def interrupted(signalled: signal.Signals, time_limit: int, over: bool, again: str) -> tuple[int, str]:
    """The exit code where a signal has ended the launcher, and no rank ran; and the sentence for that.

    Args:
        over: it is the time limit.
        again: " again" where they were about to start again.
    """
    what = f"the time limit of {time_limit} s is over" if over else signalled.name
    return EXIT_TIMED_OUT if over else EXIT_PREEMPTED, f"{what} before the ranks had started{again}"


def handle(numbers: tuple[signal.Signals, ...], handler: Callable[..., Any] | signal.Handlers) -> None:
    for number in numbers:
        signal.signal(number, handler)


def nothing(number: int, frame: FrameType | None) -> None:
    """In place of SIG_IGN, which Python complains of where the signal has come already."""


def leave_while_waiting(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    for other in (*FORWARDED, signal.SIGALRM):  # the second of two at once would end what the first has begun
        if signal.getsignal(other) is leave_while_waiting:
            signal.signal(other, nothing)
    raise Interrupted(number)
