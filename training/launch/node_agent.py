"""The launcher of each node but the first: it follows the first node's launcher, and reports the state of its node."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from types import FrameType

from lockstep.wire.hangs import Hangs

from ..contract import EXIT_PREEMPTED, EXIT_USAGE, to_stderr
from ..limits import NODE_LOOK_SECONDS, STOP_SECONDS, STOPPED_SECONDS
from .ending import Attempts
from .nodes import (
    FOREIGN,
    LEASE,
    CannotMeet,
    DesiredState,
    Ending,
    Meeting,
    NodeSlot,
    Report,
    SignedStore,
    joined,
    pace,
)
from .workers import Interrupted, WorkerGroup


class NodeAgent(WorkerGroup):
    """The worker group of a node that follows the first node. If the first node is gone, or counts this node as lost, the ranks here end,
    and the node joins again."""

    def __init__(self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs) -> None:
        super().__init__(args, meeting, attempts, hangs)
        self._report = Report(address=meeting.address, ranks=args.ranks)
        self._lease = LEASE * args.lost_seconds
        self._leaves = False
        """Whether a signal has asked this node to leave, and none of its ranks runs, or the others may continue."""
        self._signalled = 0
        """The signal for all ranks that this launcher has forwarded; 0: none."""
        self._connecting = False
        self._state: DesiredState | None = None
        self._slot: NodeSlot | None = None
        self._codes: list[tuple[int, int, int, bool]] = []
        """The entries of `Report.ended`."""
        self._over_since = 0.0
        """Time at which all ranks were asked to end (`time.monotonic`); 0: they were not."""
        self._handed_on = False
        """Whether the first node's signal was forwarded to the ranks."""

    @property
    def index(self) -> int:
        """The index of this node among the nodes; -1: it has no slot."""
        return -1 if self._state is None or self._slot is None else self._state.seats.index(self._slot)

    def run(self, store: SignedStore, number: int) -> Ending:
        """Runs the ranks of this node. Returns the end of the job, or of this node's part in it.

        Raises `CannotMeet`, `OSError`, `Interrupted`.

        Args:
            store: the first node's store.
            number: the number of this launcher in the store.
        """
        while True:
            link = Link(store, number, self._report, pace(self.meeting.nodes))
            try:
                if (ending := self._follow(link)) is not None:
                    return ending
            finally:
                self._end_all()
                link.close()
            if self.signalled is not None:
                if not self.args.live and not self.timed_out:  # else `settled` has the sentence
                    to_stderr(f"launch: {signal.Signals(self.signalled).name} before all nodes had ended")
                return Ending(code=EXIT_PREEMPTED, final=False, first=-1)
            self._connecting = True
            store, number = joined(self.meeting)
            self._connecting = False

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._came.append(number)
            return
        alone = self.args.live and number in (signal.SIGTERM, signal.SIGINT) and not self.timed_out
        if self._connecting and self._ends(number):
            raise Interrupted(number)
        if (self.workers.running or self._codes) and not alone:  # where its ranks have ended, it stays until all have
            if self._ends(number):
                self._signalled, self._handed_on = signal.SIGALRM if self.timed_out else number, True
            super()._forward(number, frame)
        elif not self._ends(number):
            self.held.send((), number)  # for the ranks that start next
        else:
            self._leaves = True
            self._begin_grace(number)

    def _follow(self, link: Link) -> Ending | None:
        """Follows the first node. Returns the end of the job; None: this node has to join again, or to leave."""
        self._state, self._slot, self._codes, self._over_since = None, None, [], 0.0
        while True:
            looked = time.monotonic()
            ended = self._ended()
            if time.monotonic() - looked > STOPPED_SECONDS:
                link.taken = max(link.taken, time.monotonic() - self._lease / 2)  # it has half of its time from now on
            self._codes += [(worker.rank, worker.replacement, *how) for worker, how in ended.items()]
            self._hangs.look([worker.rank for worker in self.workers.running])
            if link.foreign:
                raise CannotMeet(f"the nodes did not meet at {self.meeting.endpoint}: {FOREIGN}", EXIT_USAGE)
            if link.broken or time.monotonic() - link.taken > self._lease:
                then = ", and it joins again" if self.signalled is None else ""
                what = "is gone" if link.broken else f"has not answered for {self._lease:g} s"
                to_stderr(f"launch: the first node {what}: the ranks of this node end{then}")
                return None
            if link.state is not None and link.state != self._state:
                had: NodeSlot | None = self._slot
                self._slot = next((slot for slot in link.state.seats if slot.number == link.number), None)
                if had is not None and self._slot is None:
                    if not self._leaves:
                        to_stderr("launch: the job has gone on without this node: its ranks end, and it joins again")
                    return None
                self._take(link.state)
            state = self._state
            if self._over_since and time.monotonic() - self._over_since > STOP_SECONDS:
                self.workers.kill(self.workers.running)
            idle = not self.workers.running
            news = {
                "round": "" if state is None else state.round, "ended": list(self._codes), "leaves": self._leaves,
                "signalled": self._signalled, "idle": idle,
            }  # fmt: skip
            link.report(self._report.model_copy(update=news))
            ending = None if state is None else state.ending
            if ending is not None or (self._leaves and idle and not (state is not None and state.signal)):
                link.send(self._lease)
                return ending

    def _take(self, state: DesiredState) -> None:
        """Applies the first node's desired state to this node."""
        if self._state is None or state.round != self._state.round:
            self._end_all()
            self._codes, self._over_since, self._handed_on = [], 0.0, False
        self._state = state
        if not state.wanted:
            if not self._over_since and not state.signal:  # else they end with that, within the grace
                self._over_since = time.monotonic()
                self.workers.terminate()
        elif self._slot is not None:
            if self.workers.fresh:
                self._begin()
            self._waits = True
            self._match(state, self._slot)
            self._send_what_came()
        if state.signal and not self._handed_on:
            self._handed_on = True
            super()._forward(state.signal, None)


class Link:
    """The connection to the first node: a thread sends this node's report and reads the desired state, again and again.

    torch limits the time of a connection, and not of an answer, so nothing here waits for the thread.

    Args:
        store: the first node's store.
        number: the number of this launcher in the store.
        report: the first report.
        seconds: time between two reports.
    """

    def __init__(self, store: SignedStore, number: int, report: Report, seconds: float) -> None:
        self.number, self._store = number, store
        self.foreign = False
        """Whether the store holds a value that is signed with another secret."""
        self.state: DesiredState | None = None
        self.taken = time.monotonic()
        """Time at which the last report that arrived was sent (`time.monotonic`)."""
        self.broken = False
        """Whether the store does not answer any more."""
        self._report, self._arrived = report, -1
        self._beat, self._seconds = 0, seconds
        self._changed, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._exchange, name="nodes", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        if report != self._report:
            self._changed.set()
        self._report = report

    def send(self, seconds: float) -> None:
        """Waits until the last report has arrived, for this many seconds at most."""
        deadline, wanted = time.monotonic() + seconds, self._beat
        self._changed.set()
        while self._arrived <= wanted and not self.broken and time.monotonic() < deadline:
            time.sleep(NODE_LOOK_SECONDS / 5)

    def close(self) -> None:
        self._over = True
        self._changed.set()
        self._thread.join(NODE_LOOK_SECONDS)

    def _exchange(self) -> None:
        try:
            while not self._over:
                began = time.monotonic()
                self._changed.clear()
                self._beat += 1
                beat, report = self._beat, self._report.model_copy(update={"beat": self._beat})
                self._store.set(f"report/{self.number}", report.model_dump_json())
                state = self._store.document("word", DesiredState)
                self.foreign = self.state is None and state is None and self._store.foreign("open")
                self.taken, self._arrived = max(self.taken, began), beat
                if state is not None and (self.state is None or state.version > self.state.version):
                    self.state = state
                self._changed.wait(self._seconds)
        except (RuntimeError, ValueError):  # torch's DistError among them
            self.broken = True
