"""The launcher of another node than the first one: has the ranks run that the first one wants here."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..contract import EXIT_PREEMPTED, to_stderr
from ..limits import NODE_LOOK_SECONDS, STOP_SECONDS, STOPPED_SECONDS
from .nodes import LEASE, DesiredState, Ending, Link, NodeSlot, Report, environment, of_seat
from .rendezvous import FOREIGN, Foreign
from .worker_group import Interrupted, WorkerGroup
from .workers import Workers


class NodeAgent(WorkerGroup):
    """Follows the first node's word. Where that one is gone, or takes this one for lost, its ranks end, and it joins again.

    Args:
        processes: of this node.
        connect: to the first node. Raises `NotMet`, `Interrupted`.
        report: what is always the same in this node's reports.
        of_group: `WorkerGroup`'s arguments.
    """

    def __init__(self, processes: Workers, connect: Callable[[], Link], report: Report, **of_group: Any) -> None:
        super().__init__(**of_group)
        self._processes, self._connect, self._report = processes, connect, report
        self._leaves = False
        """This node was told to leave, and none of its ranks runs, or the others may go on."""
        self._signalled = 0
        """The signal for all ranks that it has handed on."""
        self._connecting = self._waits = False
        self._came: list[int] = []
        """Signals that came while ranks were starting: one that is sent then would miss the last of them."""
        self.place = -1
        """Among the nodes; -1: it has none yet."""
        self._word: DesiredState | None = None
        self._seat: NodeSlot | None = None
        self._ended: list[tuple[int, int, int, bool]] = []
        """As in `Report`."""
        self._over_since = 0.0
        """When all ranks were asked to end."""
        self._handed_on = False
        """The first node's signal has reached the ranks."""

    def run(self) -> Ending:
        """How the job has ended, or this node's part in it. Raises `NotMet`, `CannotMeet`, `OSError`, `Interrupted`."""
        while True:
            self._connecting = True
            link = self._connect()
            self._connecting = False
            try:
                if (ending := self._follow(link)) is not None:
                    return ending
            finally:
                self._processes.kill_all()
                self._processes.finish()
                link.close()
            if self.signalled is not None:
                if not self.live and not self.timed_out:  # else `settled` has the sentence
                    to_stderr(f"launch: {signal.Signals(self.signalled).name} before all nodes had ended")
                return _LEFT

    def _pids(self) -> list[int]:
        return self._processes.pids()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._came.append(number)
            return
        alone = self.live and number in (signal.SIGTERM, signal.SIGINT) and not self.timed_out
        if self._connecting and self._ends(number):
            raise Interrupted(number)
        if (self._pids() or self._ended) and not alone:  # where its ranks have ended, it stays until all have
            if self._ends(number):
                self._signalled, self._handed_on = signal.SIGALRM if self.timed_out else number, True
            super()._forward(number, frame)
        elif not self._ends(number):
            self.held.send((), number)  # for the ranks that start next
        else:
            self._leaves = True
            self._begin_grace(number)

    def _follow(self, link: Link) -> Ending | None:
        """None: this node has to come anew, or to leave."""
        self._word, self._seat, self._ended, self._over_since = None, None, [], 0.0
        while True:
            looked = time.monotonic()
            ended = self._processes.ended(NODE_LOOK_SECONDS)
            if time.monotonic() - looked > STOPPED_SECONDS:
                link.heard_before(LEASE * self.lost_seconds / 2)
            for place, code in ended.items():
                self._ended.append((place.rank, place.replacement, code, -code in self.held.delivered))
            self.held.release(self._pids())
            self.hangs.look([place.rank for place in self._processes.places])
            if link.foreign:
                raise Foreign(FOREIGN)
            if link.silent(LEASE * self.lost_seconds):
                then = ", and it joins again" if self.signalled is None else ""
                what = "is gone" if link.broken else f"has not answered for {LEASE * self.lost_seconds:g} s"
                to_stderr(f"launch: the first node {what}: the ranks of this node end{then}")
                return None
            heard = link.word
            if heard is not None and heard != self._word:
                had: NodeSlot | None = self._seat
                self._seat = next((one for one in heard.seats if one.number == link.number), None)
                if had is not None and self._seat is None:
                    if not self._leaves:
                        to_stderr("launch: the job has gone on without this node: its ranks end, and it joins again")
                    return None
                self._take(heard)
            word = self._word
            if self._over_since and time.monotonic() - self._over_since > STOP_SECONDS:
                self._processes.kill_all()
            over = word is not None and word.ending is not None and not self._pids()
            if over:
                self._processes.finish()
            link.report(
                self._report.model_copy(
                    update={
                        "round": "" if word is None else word.round, "ended": list(self._ended),
                        "stopped": self._processes.stopped() if self.live else [], "leaves": self._leaves,
                        "signalled": self._signalled, "idle": not self._pids(), "parts": over,
                    }
                )
            )  # fmt: skip
            if over:
                link.send(LEASE * self.lost_seconds)
                assert word is not None
                return word.ending
            if self._leaves and not self._pids() and not (word is not None and word.signal):
                link.send(LEASE * self.lost_seconds)
                return None

    def _take(self, word: DesiredState) -> None:
        """Makes it so."""
        if self._word is None or word.round != self._word.round:
            self._processes.kill_all()
            self._processes.finish()
            self._ended, self._over_since, self._handed_on = [], 0.0, False
        self._word = word
        if word.over:
            if not self._over_since and not word.signal:  # else they end with that, within the grace
                self._over_since = time.monotonic()
                self._processes.terminate()
        elif self._seat is not None:
            self.place = word.seats.index(self._seat)
            with self._starting() if self._processes.fresh else contextlib.nullcontext():
                env = environment(word, self._seat, self.job_id, self.lost_seconds if self.live else None)
                self._waits = True
                self._processes.match(of_seat(word, self._seat), self._seat.first, env)
            self._waits, came, self._came = False, self._came, []
            for number in came:
                self._forward(number, None)
        if word.signal and not self._handed_on:
            self._handed_on = True
            super()._forward(word.signal, None)


_LEFT = Ending(code=EXIT_PREEMPTED, final=False, first=-1)
"""This node was told to leave."""
