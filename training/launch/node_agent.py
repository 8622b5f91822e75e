"""What the launcher of each node does: it has the ranks run that the desired state wants there, and hands signals on to them.

`WorkerGroup` is that of every node. The first node's is the `Coordinator`, which decides. The others' is the `NodeAgent`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep.wire.hangs import Hangs
from lockstep.wire.signals import FORWARDED, PendingSignals

from ..contract import (
    ENV_LIVE,
    ENV_NOTE,
    ENV_RESTARTS,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    EXIT_USAGE,
    to_stderr,
)
from ..limits import NODE_LOOK_SECONDS, STOP_SECONDS, STOPPED_SECONDS
from .ending import Attempts, note_end, too_early
from .nodes import (
    FOREIGN,
    LEASE,
    DesiredState,
    Ending,
    Foreign,
    Link,
    Meeting,
    NodeSlot,
    Report,
    SignedStore,
    joined,
    pace,
    size,
)
from .workers import WorkerId, Workers


class Interrupted(Exception):
    """A signal ends the launcher while no rank runs."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = signal.Signals(number)


class WorkerGroup:
    """The ranks of this node.

    Args:
        args: the launcher's flags, with the `command` of a rank. `ours`: the ranks are `python -m lockstep.training run`, which saves on
            a signal, and not an unknown program. `caught`: the signals that are caught. The ranks ignore the signals that this process
            ignores (nohup), too.
        hangs: looks for ranks that get no further.
    """

    def __init__(self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs) -> None:
        self.args, self.meeting, self.attempts, self._hangs = args, meeting, attempts, hangs
        self.workers = Workers(args.command, prefix=args.prefix, blocked=args.ours)
        self.signalled: int | None = None
        self.timed_out = False
        self.held = PendingSignals()
        """Signals for ranks that are starting."""
        self._waits = False
        """Ranks are about to start: a signal that is sent now would miss the last of them."""
        self._came: list[int] = []
        """Signals that came meanwhile."""
        self._reasons: list[str] = []
        """How ranks have failed, a sentence for each way."""
        self.has_begun = False
        """The ranks were started, or are about to be."""
        self.starts = attempts.used
        """How often the ranks were started before, by this launcher or one that it replaced."""

    def _begin(self) -> None:
        """The ranks are about to start."""
        os.environ[ENV_RESTARTS] = str(self.starts)
        self.has_begun = True
        self.starts += 1  # a change of membership counts here, and not as a restart
        earlier, self.held = self.held, PendingSignals(self.args.grace)  # from here on it takes what comes
        self.held.inherit(earlier)

    def _match(self, state: DesiredState, slot: NodeSlot) -> None:
        """Has the processes run that are wanted on this node, and no others. Their variables are torchrun's. Raises `OSError`."""
        world = str(size(state.seats))
        env = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": str(slot.ranks),
            "GROUP_RANK": str(state.seats.index(slot)), "GROUP_WORLD_SIZE": str(len(state.seats)),
            "ROLE_NAME": "rank", "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": state.master[0], "MASTER_PORT": str(state.master[1]), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.meeting.job_id, "TORCHELASTIC_RESTART_COUNT": str(state.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(state.max_restarts),
        }  # fmt: skip
        if self.args.live:
            env[ENV_LIVE] = str(self.args.lost_seconds)
        wanted = [WorkerId(rank, replacement) for rank, replacement in state.wanted if rank in slot.span]
        self.workers.match(wanted, slot.first, env)

    def _send_what_came(self) -> None:
        """The ranks have started."""
        self._waits = False
        came, self._came = self._came, []
        for number in came:
            self._forward(number, None)

    def _ended(self) -> dict[WorkerId, tuple[int, bool]]:
        """Returns the processes that have ended since the last call: exit code, and whether by a signal that was handed on."""
        codes = self.workers.ended(NODE_LOOK_SECONDS)
        ended = {worker: (code, -code in self.held.delivered) for worker, code in codes.items()}
        self.held.release(self.workers.pids())
        return ended

    def _end_all(self) -> None:
        """Kills what runs, and prints what it has written."""
        self.workers.kill(self.workers.running)
        self.workers.finish()

    def catch(self) -> None:
        handle(self.args.caught, self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        if self._ends(number):
            self._begin_grace(number)
        self.held.send(self.workers.pids(), number)  # without one, for the ranks that start next

    def _begin_grace(self, number: int) -> None:
        """The ranks have this long from the first signal on."""
        if self.signalled is None:
            signal.signal(signal.SIGALRM, self._kill)
            signal.setitimer(signal.ITIMER_REAL, self.args.grace)
        self.signalled = number

    def _ends(self, number: int) -> bool:
        """Returns whether ranks end at this signal: what a program does with a USR1 is unknown."""
        return self.args.ours or number in (signal.SIGTERM, signal.SIGINT)

    def limit(self, began: float) -> None:
        """Ends the ranks when the time limit, counted from then, is over, as TERM does."""
        signal.signal(signal.SIGALRM, self._over)
        limit = self.args.time_limit
        signal.setitimer(signal.ITIMER_REAL, max(0.001, limit - (time.monotonic() - began)) if limit else 0)

    def _over(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        self.timed_out = True
        self._forward(signal.SIGTERM, frame)

    def _kill(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's signature
        """The grace is over: kills the ranks that still run. Again and again: a rank may just be starting."""
        signal.setitimer(signal.ITIMER_REAL, 1)
        if pids := self.workers.pids():
            self.held.send(pids, signal.SIGKILL)

    def settled(self, code: int, codes: Mapping[int, int]) -> int:
        """Returns the exit code, where the ranks ended like that: a signal changes nothing any more.

        Args:
            code: of the ranks together.
            codes: rank → its exit code, of those that failed.
        """
        handle(self.args.caught, signal.SIG_IGN)
        if self.args.ours and code == EXIT_FAILED and (name := too_early(codes, self.signalled)):
            to_stderr(f"launch: {name} before any rank had started")
            code = EXIT_PREEMPTED
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.timed_out and code not in (EXIT_DONE, EXIT_USAGE):
            to_stderr(f"launch: the time limit of {self.args.time_limit} s is over")
            code = EXIT_TIMED_OUT
        if code != EXIT_DONE:
            self.note(code, "; ".join(self._reasons) or f"the ranks ended with exit code {code}")
        return code

    def note(self, code: int, reason: str) -> None:
        """Completes status.json of the run, where rank 0 could not."""
        note_end(Path(os.environ[ENV_NOTE]), code, reason)


class NodeAgent(WorkerGroup):
    """Follows the first node. Where that one is gone, or takes this one for lost, its ranks end, and it joins again."""

    def __init__(self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs) -> None:
        super().__init__(args, meeting, attempts, hangs)
        self._report = Report(address=meeting.address, ranks=args.ranks)
        self._lease = LEASE * args.lost_seconds
        self._leaves = False
        """A signal asked this node to leave, and none of its ranks runs, or the others may continue."""
        self._signalled = 0
        """The signal for all ranks that it has handed on."""
        self._connecting = False
        self._state: DesiredState | None = None
        self._slot: NodeSlot | None = None
        self._codes: list[tuple[int, int, int, bool]] = []
        """`ended` of `Report`."""
        self._over_since = 0.0
        """When all ranks were asked to end."""
        self._handed_on = False
        """The first node's signal has reached the ranks."""

    @property
    def index(self) -> int:
        """Among the nodes; -1: it is none of them."""
        return -1 if self._state is None or self._slot is None else self._state.seats.index(self._slot)

    def run(self, store: SignedStore, number: int) -> Ending:
        """Returns how the job has ended, or this node's part in it. Raises `NotMet`, `CannotMeet`, `OSError`, `Interrupted`.

        Args:
            store: the first node's.
            number: of this launcher there.
        """
        while True:
            link = Link(store, number, self._report, pace(self.meeting.max_nodes))
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
        """Returns how the job has ended; None: this node has to come anew, or to leave."""
        self._state, self._slot, self._codes, self._over_since = None, None, [], 0.0
        while True:
            looked = time.monotonic()
            ended = self._ended()
            if time.monotonic() - looked > STOPPED_SECONDS:
                link.heard_before(self._lease / 2)
            self._codes += [(worker.rank, worker.replacement, *how) for worker, how in ended.items()]
            self._hangs.look([worker.rank for worker in self.workers.running])
            if link.foreign:
                raise Foreign(FOREIGN)
            if link.silent(self._lease):
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
                "stopped": self.workers.stopped() if self.args.live else [], "signalled": self._signalled, "idle": idle,
            }  # fmt: skip
            link.report(self._report.model_copy(update=news))
            ending = None if state is None else state.ending
            if ending is not None or (self._leaves and idle and not (state is not None and state.signal)):
                link.send(self._lease)
                return ending

    def _take(self, state: DesiredState) -> None:
        """Does what the first node wants here."""
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
