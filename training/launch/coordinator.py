"""The launcher that decides for all nodes: that of the only node, or of the node that serves the rendezvous.

It serves the ranks' store, where it records which ranks have ended, and how. If one rank fails, all end, and restart from the last
checkpoint, as often as `--max-restarts` allows. No node leaves before the ranks of all nodes have ended: a cluster ends a job with the
first node that leaves, and removes the others.

Under `launch --live` the other ranks continue if a rank or a node is lost. A rank is lost if a signal that its launcher did
not send has ended it. It is also lost if a signal to it alone asks it to leave, or with its node.
Its launcher kills its process group, whose data loaders hold its sockets. This launcher writes the remaining ranks into the ranks' store:
a *generation*. The ranks regroup by it (`parallel/live.py`). Every other end of a rank has the same effect as without `--live`.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
import uuid
from collections.abc import Container, Iterable, Mapping
from types import FrameType

from lockstep.wire.hangs import Hangs

from ..contract import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, named, to_stderr
from ..limits import ERROR_SECONDS, LEAVE_SECONDS, STOP_SECONDS, STORE_SECONDS
from ..parallel import stores
from .ending import FINAL, Attempts, deaths, how, too_early, without_ended
from .nodes import DesiredState, Ending, Meeting, NodeEvents, Nodes, SignedStore, WorkerId, size
from .workers import Interrupted, WorkerGroup


class Coordinator(WorkerGroup):
    """The worker group of the first node, which decides which ranks run.

    Args:
        store: the store of the rendezvous; None: the job has one node.
    """

    def __init__(
        self, args: argparse.Namespace, meeting: Meeting, attempts: Attempts, hangs: Hangs, store: SignedStore | None
    ) -> None:
        super().__init__(args, meeting, attempts, hangs)
        self._nodes = Nodes(store, meeting, ranks=args.ranks, lost_seconds=args.lost_seconds)
        self._waits = True
        """Whether some ranks are still missing."""
        self._stops = False
        """Whether all ranks are about to end, and perhaps to restart."""
        self._for_all = False
        """Whether a signal that ends the ranks was for all of them."""
        self._id = uuid.uuid4().hex
        """The id that distinguishes the rounds of this launcher from those of a launcher that it replaces."""

    def run(self) -> dict[int, int]:
        """Runs the ranks until they have ended for good. Returns rank → exit code of the failed ranks.

        Raises:
            OSError: a rank cannot be started.
            Interrupted: a signal ends the launcher before the ranks have started.
            CannotMeet: not all nodes came.
        """
        try:
            while True:
                self._start()
                failed = self._watch()
                codes = {**failed, **self._end(failed)}
                if not self.held.delivered:
                    codes = without_ended(codes, failed)
                counted = self._counted and self._store.check([stores.AGAIN])
                if not codes or not self._start_again(codes, failed, self.attempts.left + counted):
                    return codes
                if not counted:
                    self.attempts.restarted()
        finally:
            self._end_all()

    def part(self, code: int, codes: Iterable[int], final: bool = False) -> bool:
        """Announces the end of the job to the other nodes. Returns whether this node leaves first.

        Args:
            codes: the failed ranks. The node of the first failed rank leaves first, else this node. Clusters end a job with the first node
                that leaves, and remove the others' logs.
            final: whether no cluster may restart a node, even with restarts left.
        """
        failed = min(codes, default=0)
        first = next(index for index, slot in enumerate(self._nodes.slots) if failed in slot.span)
        final = final or (code == EXIT_FAILED and self.attempts.left <= 0)
        self._nodes.part(Ending(code=code, final=final, first=first))
        return first == 0  # the index of this node

    def _forward(self, number: int, frame: FrameType | None) -> None:
        pids, ends = self.workers.pids(), self._ends(number)
        self._for_all = self._for_all or ends
        if self._waits or not self._running:
            self._came.append(number)
        elif self._stops and not ends:
            if pids:
                self.held.send(pids, number)
            self._came.append(number)  # for those that start next
        elif pids or not ends:
            super()._forward(number, frame)
        else:  # the ranks that are left are on other nodes, and get it with the next state
            self.signalled = number

    def _start(self) -> None:
        self._waits = True
        self._end_if_signalled()
        self._nodes.gather(over=lambda: any(self._ends(number) for number in self._came))
        self._end_if_signalled()
        ranks = size(self._nodes.slots)
        self._running = {rank: WorkerId(rank) for rank in range(ranks)}
        """Rank → its process, of the ranks that train or are about to."""
        self._spares: dict[int, WorkerId] = {}
        """Rank → its replacement, which the others have not admitted yet."""
        self._counted = False
        """Whether the newest loss has counted as a restart. If the others cannot continue after it, the loss does not count again."""
        self._some_done = self._for_all = False
        self._started_after = self.attempts.times
        self._generation = self._replacements = self._admissions = 0
        self._ending, self._answered = False, 0
        self._asked, self._leave = dict[int, float](), dict[int, str]()
        self._with_nodes: dict[int, str] = {}
        """Rank that was lost with its node → a sentence about the loss."""
        self._overdue: set[int] = set()
        """Ranks that were killed at the end of the grace period."""
        self._begin()
        address = self.meeting.address
        # The ranks start first: the store needs torch, and both import it at the same time. Connections wait in the socket.
        socket = stores.listening(address, 0)
        if socket is not None:
            self._begin_ranks(socket.getsockname()[1])
        self._store = stores.tcp_store(address, 0, serves=True, seconds=STORE_SECONDS, socket=socket)
        if socket is None:
            self._begin_ranks(self._store.port)

    def _begin_ranks(self, port: int) -> None:
        """Starts the ranks, whose store has this port."""
        self._port = port
        self._announce()
        self._stops = False
        self._send_what_came()

    def _end_if_signalled(self) -> None:
        if ends := [number for number in self._came if self._ends(number)]:
            raise Interrupted(ends[0])

    def _announce(self, over: bool = False) -> None:
        """Announces the processes that must run on all nodes, and starts and kills those of this node.

        Args:
            over: whether all ranks must end.
        """
        workers = [] if over else [*self._running.values(), *self._spares.values()]
        self._sent_signal = self.signalled
        state = DesiredState(
            round=f"{self._id}-{self.starts}",
            seats=self._nodes.slots,
            wanted=[(worker.rank, worker.replacement) for worker in workers],
            master=(self.meeting.address, self._port),
            restarts=self._started_after,
            max_restarts=self.attempts.left + self.attempts.times,
            signal=self._ending_signal if over else self.signalled or 0,
        )
        self._nodes.announce(state)
        if not over:
            self._match(state, self._nodes.slots[0])

    @property
    def _ending_signal(self) -> int:
        """The signal that ends the job; 0: there is none."""
        return self.signalled or (signal.SIGTERM if self._ending else 0)

    def _replace(self, ranks: Iterable[int]) -> None:
        """Starts a replacement for each of these ranks, which the others admit once it is prepared. Counts one restart for all."""
        if self.attempts.left <= 0 or self.signalled is not None:
            return
        self.attempts.restarted()
        self._counted = True
        for rank in ranks:
            self._replacements += 1
            self._spares[rank] = WorkerId(rank, self._replacements)

    def _admit(self) -> None:
        """Admits the prepared replacements, if the ranks ask for them."""
        key = stores.admission(self._admissions + 1)
        if not self._generation or not self._store.check([key]):
            return
        self._admissions += 1
        prepared = [one for one in self._spares.values() if self._store.check([stores.prepared(one.replacement)])]
        generation = self._generation + 1
        for one in prepared:
            self._running[one.rank] = self._spares.pop(one.rank)
            leaving = stores.leaving(one.rank)
            for of_the_lost_one in (stores.ended(one.rank), leaving, f"{leaving}/alone"):
                self._store.delete_key(of_the_lost_one)
            self._leave.pop(one.rank, None)
            self._store.set(stores.admitted(one.replacement), f"{self._admissions} {generation}")
        self._store.set(f"{key}/answer", str(generation))
        self._new_generation()
        for one in prepared:
            to_stderr(f"launch: rank {one.rank} was replaced: {self._count()} ranks train")

    def _new_generation(self) -> None:
        self._generation += 1
        # The first of them leads, so those that are admitted come last.
        self._store.set(stores.generation(self._generation), json.dumps(list(self._running)))

    def _count(self) -> str:
        return f"{len(self._running)} of {size(self._nodes.slots)}"

    def _watch(self) -> dict[int, int]:
        """Watches until all ranks have succeeded, or the remaining ones must end. Returns rank → exit code of the failed ranks."""
        live = self.args.live
        while self._running:
            self._admit()
            ended, events = self._look()
            lost = {rank: code for rank, (code, handed_on) in ended.items() if code < 0 and not handed_on}
            codes = {rank: code for rank, (code, _) in ended.items() if code}
            self._some_done = self._some_done or len(codes) < len(ended)
            for rank, code in codes.items():
                if code not in FINAL:  # else the rank has reported why
                    self._store.set(stores.ended(rank), self._leave.get(rank) or how(code))
            failed = bool(codes) and (not live or any(rank not in lost for rank in codes))
            reasons = [f"rank {rank} was {self._leave[rank]}" for rank in lost if rank in self._leave]
            reasons += deaths({rank: code for rank, code in lost.items() if rank not in self._leave}, None, lost)
            with_nodes = {} if failed else self._without_nodes(events, reasons)
            codes.update(with_nodes)
            if failed or (codes and not self._continue(lost, with_nodes, reasons)):
                return codes
            if live:
                self._answer_those_who_leave(bool(events.signalled))
                self._take_newcomers()
            if self._sent_signal != self.signalled:
                self._announce()
        return {}

    def _without_nodes(self, events: NodeEvents, reasons: list[str]) -> dict[int, int]:
        """Returns rank → code of the ranks on lost nodes. Adds to `reasons`."""
        codes: dict[int, int] = {}
        for node in events.lost:
            slot = node.slot
            ranks = [rank for rank in self._running if rank in slot.span]
            if node.leaves and ranks and (self.signalled is not None or self._why_not(len(self._running) - len(ranks))):
                if self.signalled is None:  # the others cannot continue without it, so all save
                    self._forward(signal.SIGTERM, None)
                continue
            self._nodes.leave(slot)
            for rank in slot.span:
                self._spares.pop(rank, None)
            for rank in ranks:
                del self._running[rank]
                codes[rank] = -signal.SIGKILL
                self._store.set(stores.ended(rank), f"its node {node.address} {node.why}")
            if ranks:
                reasons.append(f"rank {named(ranks)} is lost, as node {node.address} {node.why}")
                self._with_nodes.update(dict.fromkeys(ranks, reasons[-1]))
            else:
                then = "the others train on without it" if self.args.live else "its ranks had ended"
                to_stderr(f"launch: node {node.address} {node.why}: {then}")
        return codes

    def _answer_those_who_leave(self, others_signalled: bool) -> None:
        """Tells ranks with a signal whether all ranks end, or they alone; they train until then. All end if the signal was for all, or if
        the others could not continue.

        Args:
            others_signalled: whether another node's launcher has forwarded a signal for all.
        """
        if self._ending:
            return
        if not (self._for_all or others_signalled):
            if int(self._store.add(stores.LEAVING, 0)) == self._answered:
                return
            now = time.monotonic()
            leaving = [rank for rank in self._running if self._store.check([stores.leaving(rank)])]
            self._asked = {rank: self._asked.get(rank, now) for rank in leaving if rank not in self._leave}
            if not self._asked or now - min(self._asked.values()) < LEAVE_SECONDS:
                return
            if not self._why_not(len(self._running) - len(leaving)):
                for rank in self._asked:
                    name = stores.text_at(self._store, stores.leaving(rank), r"SIG[A-Z0-9]+")
                    self._leave[rank] = f"told to leave by {name}"
                    self._store.set(f"{stores.leaving(rank)}/alone", "1")
                    self._answered += 1
                return
        self._ending = True
        self._store.set(stores.ENDING, "1")

    def _take_newcomers(self) -> None:
        """Gives the slots of lost nodes to nodes that have come since."""
        while (
            self._generation and self.signalled is None and self.attempts.left > 0
            and (slot := self._nodes.newcomer()) is not None
        ):  # fmt: skip
            to_stderr(f"launch: node {self._nodes.address(slot)} has come: its ranks will be {named(list(slot.span))}")
            self._replace(slot.span)
            self._announce()

    def _why_not(self, remaining: int) -> str:
        """Returns why this number of ranks cannot continue without the others; "": they can."""
        if not self.args.live:
            return "there is no --live"
        if not self._store.check([stores.ready(rank) for rank in range(size(self._nodes.slots))]):
            return "not all ranks had begun"
        if remaining < self.args.min_ranks:
            return f"{remaining} would remain, and --min-ranks is {self.args.min_ranks}"
        return "others have ended" if self._some_done else ""

    def _continue(self, lost: Iterable[int], with_nodes: Iterable[int], reasons: list[str]) -> bool:
        """Makes the others continue without these lost ranks. Returns False, and reports the reason, if they cannot."""
        if not self.args.live:
            return False
        if why := self._why_not(len(self._running)):
            to_stderr(f"launch: no rank continues without rank {named(sorted([*lost, *with_nodes]))}: {why}")
            return False
        self._new_generation()
        to_stderr(f"launch: {'; '.join(reasons)}: {self._count()} ranks continue")
        self._counted = False
        for rank in sorted(lost):
            self._replace([rank])
        self._announce()
        return True

    def _look(self) -> tuple[dict[int, tuple[int, bool]], NodeEvents]:
        """Returns (rank → (exit code, whether a forwarded signal ended it) of ranks that have ended, events on the other nodes)."""
        here, events = self._ended(), self._nodes.look()
        if events.signalled and not self.args.live and self.signalled is None:
            end = self._over if events.signalled == signal.SIGALRM else self._forward
            end(events.signalled, None)
        ended: dict[int, tuple[int, bool]] = {}
        for worker, (code, handed_on) in {**here, **events.ended}.items():
            if handed_on and code == -signal.SIGKILL:
                self._overdue.add(worker.rank)
            if self._running.get(worker.rank) == worker:
                del self._running[worker.rank]
                # What a replacement was started with is right for the others.
                ended[worker.rank] = (EXIT_FAILED if code == EXIT_USAGE and worker.replacement else code, handed_on)
            elif self._spares.get(worker.rank) == worker:
                del self._spares[worker.rank]
                if self.signalled is None:
                    to_stderr(
                        f"launch: the replacement of rank {worker.rank} {how(code)}: the others train on without it"
                    )
        self._hangs.look([worker.rank for worker in self.workers.running if self._running.get(worker.rank) == worker])
        return ended, events

    def _end(self, failed: Mapping[int, int]) -> dict[int, int]:
        """Ends the running ranks. Returns rank → exit code of those that fail."""
        codes: dict[int, int] = {}
        self._stops = True

        def look() -> None:
            ended, events = self._look()
            codes.update((rank, code) for rank, (code, _) in ended.items())
            for node in events.lost:
                if not node.leaves:
                    self._nodes.leave(node.slot)

        deadline = time.monotonic() + ERROR_SECONDS
        raised = any(code > 0 and code != EXIT_PREEMPTED for code in failed.values())
        while raised and self._running and self.signalled is None and time.monotonic() < deadline:
            look()  # another rank may be about to report an error, too
        self.workers.kill([worker for worker in self.workers.running if worker.rank in self._spares])
        self._spares.clear()
        saving = bool(self._ending_signal)  # the ranks have it: they have the grace, and no second one
        if not saving:
            self.workers.terminate()
        self._announce(over=True)
        deadline = time.monotonic() + (self._look_for_grace() if saving else STOP_SECONDS)
        while self.workers.running or not self._nodes.idle:
            look()
            if time.monotonic() > deadline:
                killed = self.workers.kill(self.workers.running)
                if saving:
                    self._overdue.update(worker.rank for worker in killed)
                codes.update((worker.rank, code) for worker, code in killed.items())
            if time.monotonic() > deadline + self.args.lost_seconds:
                break  # the state of the next round kills what runs there
        self.workers.finish()
        return {rank: code for rank, code in codes.items() if code}

    def _start_again(self, codes: Mapping[int, int], failed: Container[int], left: int) -> bool:
        """Reports how ranks have failed. Returns whether all restart: not after a final code, or a signal that has ended them.

        Args:
            codes: rank → exit code of all failed ranks.
            failed: ranks that had failed before the launcher ended the others.
            left: remaining restarts.
        """
        if self.signalled is None:
            self.signalled = self.held.ending(codes.values())  # one that no rank has used for itself
        overdue = {rank for rank in self._overdue if codes.get(rank) == -signal.SIGKILL}
        others = {rank: code for rank, code in codes.items() if rank not in overdue and rank not in self._with_nodes}
        grace = f"the launcher killed rank {named(sorted(overdue))}: the grace of {self.grace:g} s was over"
        with_nodes = sorted({self._with_nodes[rank] for rank in codes if rank in self._with_nodes})
        ours = self.args.ours
        self._reasons = [grace] * bool(overdue) + with_nodes + deaths(others, self.signalled, failed, ours)
        for line in self._reasons:
            to_stderr(f"launch: {line}")
        if not ours and (name := too_early(codes, self.signalled)):
            to_stderr(f"launch: the ranks were ended by {name}, which they did not catch")
        again = left > 0 and self.signalled is None and set(FINAL).isdisjoint(codes.values())
        if again:
            to_stderr(f"launch: all ranks start again; restarts left after that: {left - 1}")
        return again
