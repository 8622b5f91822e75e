"""The launcher that decides for all nodes: of the only node, or of the one that serves the rendezvous.

It serves the ranks' store, where it says which ranks have ended, and how. If one fails, all end, and start again from the last checkpoint,
as often as `--max-restarts` allows. So they do without counting that where a node comes to an elastic job. No node leaves before the ranks
of all have ended: a cluster ends a job with the first node that does, and takes the others away.

Under `launch --live` the other ranks go on where a rank or a node is lost. A rank is lost when a signal has ended it that its launcher did
not send, when it stands stopped while others run, when a signal to it alone has told it to leave, or with its node. Its launcher kills its
process group, whose data loaders hold its sockets, and this one says in the ranks' store who remains: a *generation*. What the ranks make
of that is theirs (`parallel/live.py`). All else that happens to a rank is as without `--live`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed import DistError, TCPStore

from lockstep.wire.hangs import Hangs
from lockstep.wire.signals import FORWARDED

from ..contract import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, named, to_stderr
from ..limits import ERROR_SECONDS, LEAVE_SECONDS, NODE_LOOK_SECONDS, STOP_SECONDS, STORE_SECONDS
from ..parallel import stores
from . import rendezvous
from .ending import (
    FINAL,
    Attempts,
    deaths,
    exit_code,
    how,
    raising,
    without_ended,
)
from .node_agent import NodeAgent
from .nodes import (
    DesiredState,
    Ending,
    Link,
    NodeEvents,
    Nodes,
    NodeSlot,
    Report,
    environment,
    of_seat,
    pace,
    size,
)  # fmt: skip
from .rendezvous import CannotMeet, Meeting, NotMet, Secret
from .worker_group import Interrupted, WorkerGroup, handle, interrupted, leave_while_waiting
from .workers import WorkerId, Workers


class Coordinator(WorkerGroup):
    """Says which ranks there are.

    Args:
        processes: of this node.
        ranks: of this node.
        nodes: the other ones; None: there are none.
        address: of this node, as the others see it.
        min_ranks: with fewer, none goes on.
        join_seconds: how long to wait for the nodes.
        of_group: `WorkerGroup`'s arguments.
    """

    def __init__(
        self, processes: Workers, ranks: int, nodes: Nodes | None, address: str, *, min_ranks: int, join_seconds: float, **of_group: Any,
    ) -> None:  # fmt: skip
        super().__init__(**of_group)
        self._processes, self._nodes, self._address = processes, nodes, address
        self._min_ranks, self._join_seconds = min_ranks, join_seconds
        self._seats = [NodeSlot(number=0, first=0, ranks=ranks)]
        self._running: dict[int, WorkerId] = {}
        """The ranks that train, and those that are about to."""
        self._spares: dict[int, WorkerId] = {}
        """Replacements of lost ranks that the others have not admitted yet."""
        self._replacements = self._admissions = 0
        self._counted = False
        """The newest loss of this start has counted as a restart: where the others cannot go on after it, it is not another one."""
        self._came: list[int] = []
        """Signals that came while not all ranks were there."""
        self._waits = True
        """Not all are there."""
        self._stops = False
        """All are about to end, and perhaps to start again."""
        self._for_all = False
        """A signal that ends the ranks was for all."""
        self._regroups = False
        """All end, and start again, as a node has come."""
        self._id = uuid.uuid4().hex
        """Tells its words from those of a launcher that it replaces."""

    def run(self) -> dict[int, int]:
        """Returns when the ranks have ended for good: rank → exit code, of those that failed.

        Raises:
            OSError: a rank cannot be started.
            Interrupted: a signal ends the launcher before the ranks have started.
            NotMet: not all nodes came.
        """
        self._allowed = self.attempts.left
        try:
            while True:
                self._start()
                failed = self._watch()
                codes = {**failed, **self._end(failed)}
                if self._regroups and self.signalled is None:
                    continue
                if not self.held.delivered:
                    codes = without_ended(codes, failed)
                counted = self._counted and self._store.check([stores.AGAIN])
                if not codes or not self._start_again(codes, failed, self.attempts.left + counted):
                    return codes
                if not counted:
                    self.attempts.restarted()
        finally:
            self._processes.kill_all()
            self._processes.finish()

    def part(self, code: int, final: bool, codes: Iterable[int]) -> ExitOrder | None:
        """Tells the other nodes, if there are any, how the job has ended.

        Args:
            codes: the ranks that failed. The node of the first of them is left first, else this one: clusters end a job with its first
                node, and take the others' logs away.
        """
        if self._nodes is None:
            return None
        place = next((self._seats.index(self._seat(rank)) for rank in sorted(codes)), 0)
        self._nodes.part(Ending(code=code, final=final, first=place))
        return ExitOrder(final=False, first=place == 0)

    def _pids(self) -> list[int]:
        return self._processes.pids()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._for_all = self._for_all or self._ends(number)
        if self._waits or not self._running:
            self._came.append(number)
        elif self._stops and not self._ends(number):
            if pids := self._pids():
                self.held.send(pids, number)
            self._came.append(number)  # for those that start next
        elif self._pids() or not self._ends(number):
            super()._forward(number, frame)
        else:  # the ranks that are left are on other nodes, and get it with the next word
            self.signalled = number

    def _start(self) -> None:
        self._waits = True
        self._end_if_signalled()
        if self._nodes is not None:
            self._seats = self._nodes.gather(
                self._join_seconds, over=lambda: any(self._ends(number) for number in self._came)
            )
            self._end_if_signalled()
        self._all_ready = self._leaving = self._counted = self._regroups = self._for_all = False
        self._started_after = self.attempts.times
        self.of_lost_nodes.clear()
        self._generation, self._still, self._looked = 0, dict[int, float](), time.monotonic()
        self._replacements = self._admissions = 0
        self._ending, self._answered = False, 0
        self._asked, self._leave = dict[int, float](), dict[int, str]()
        self._store = stores.tcp_store(self._address, 0, serves=True, seconds=STORE_SECONDS)
        self._store.set(stores.NODES, json.dumps([seat.ranks for seat in self._seats]))
        self._running, self._spares = {rank: WorkerId(rank) for rank in range(size(self._seats))}, {}
        with self._starting():
            self._make_so()
        self._waits = self._stops = False
        came, self._came = self._came, []
        for number in came:
            self._forward(number, None)

    def _end_if_signalled(self) -> None:
        if ends := [number for number in self._came if self._ends(number)]:
            raise Interrupted(ends[0])

    def _make_so(self, over: bool = False) -> None:
        """Has the processes run that are wanted, and no others, on all nodes."""
        places = [] if over else [*self._running.values(), *self._spares.values()]
        self._told_of = self.signalled
        word = DesiredState(
            round=f"{self._id}-{self.starts}",
            seats=self._seats,
            wanted=[(place.rank, place.replacement) for place in places],
            master=(self._address, self._store.port),
            restarts=self._started_after,
            max_restarts=self._allowed,
            signal=self._ending_signal if over else self.signalled or 0,
            over=over,
        )
        if self._nodes is not None:
            self._nodes.say(word)
        if not over:
            here = self._seats[0]
            env = environment(word, here, self.job_id, self.lost_seconds if self.live else None)
            self._processes.match(of_seat(word, here), here.first, env)

    @property
    def _ending_signal(self) -> int:
        """The signal that ends the job, if one does."""
        return self.signalled or (signal.SIGTERM if self._ending else 0)

    def _seat(self, rank: int) -> NodeSlot:
        return next(seat for seat in self._seats if rank in seat.span)

    def _replace(self, ranks: Iterable[int]) -> None:
        """Has a process started in the place of each of these, which the others admit when it is prepared. It counts as one restart."""
        if self.attempts.left <= 0 or self.signalled is not None:
            return
        self.attempts.restarted()
        self._counted = True
        for rank in ranks:
            self._replacements += 1
            self._spares[rank] = WorkerId(rank, self._replacements)

    def _admit(self) -> None:
        """Where the ranks ask for replacements, those that are prepared are among them from here on."""
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
        self._announce()
        for one in prepared:
            to_stderr(f"launch: rank {one.rank} was replaced: {len(self._running)} of {size(self._seats)} ranks train")

    def _announce(self) -> None:
        self._generation += 1
        # The first of them leads, so those that are admitted come last.
        self._store.set(stores.generation(self._generation), json.dumps(list(self._running)))

    def _watch(self) -> dict[int, int]:
        """Returns when all ranks have ended well, or what is left of them has to end: rank → exit code, of those that failed."""
        while self._running:
            if (
                self._nodes is not None
                and not self.live
                and not self._leaving
                and self.signalled is None
                and self._nodes.more
            ):
                self._regroups = True
                return {}
            self._admit()
            ended, news = self._look()
            lost = {rank: code for rank, (code, handed_on) in ended.items() if code < 0 and not handed_on}
            codes = {rank: code for rank, (code, _) in ended.items() if code}
            self._leaving = self._leaving or any(not code for code, _ in ended.values())
            late = self._stopped(news.stopped) if self.live else {}
            lost.update(late)
            codes.update(late)
            for rank, code in codes.items():
                if code not in FINAL:  # else it has said why
                    self._store.set(stores.ended(rank), self._leave.get(rank) or how(code))
            failed = bool(codes) and (not self.live or any(rank not in lost for rank in codes))
            said = [f"rank {rank} was {self._leave[rank]}" for rank in lost if rank in self._leave]
            said += deaths({rank: code for rank, code in lost.items() if rank not in self._leave}, None, lost)
            nodes_gone = {} if failed else self._without_nodes(news, said)
            lost.update(nodes_gone)
            codes.update(nodes_gone)
            if failed or (nodes_gone and not self.live) or (lost and not self._go_on(lost, said, set(nodes_gone))):
                return codes
            if self.live:
                self._answer_those_who_leave(bool(news.signalled))
                self._take_newcomers()
            if self._told_of != self.signalled:
                self._make_so()
        return {}

    def _without_nodes(self, news: NodeEvents, said: list[str]) -> dict[int, int]:
        """The ranks of nodes that are gone: rank → a code for that."""
        found: dict[int, int] = {}
        for gone in news.gone:
            seat = gone.seat
            ranks = [rank for rank in self._running if self._seat(rank) == seat]
            if gone.leaves and ranks and (self.signalled is not None or self._why_not(len(self._running) - len(ranks))):
                if self.signalled is None:  # the others cannot go on without it, so all save
                    self._forward(signal.SIGTERM, None)
                continue
            assert self._nodes is not None
            self._nodes.leave(seat)
            for rank in seat.span:
                self._spares.pop(rank, None)
            for rank in ranks:
                del self._running[rank]
                found[rank] = -signal.SIGKILL
                self._store.set(stores.ended(rank), f"its node {gone.address} {gone.why}")
            if ranks:
                said.append(f"rank {named(ranks)} is lost, as node {gone.address} {gone.why}")
                self.of_lost_nodes.update(dict.fromkeys(ranks, said[-1]))
            else:
                then = "the others train on without it" if self.live else "its ranks had ended"
                to_stderr(f"launch: node {gone.address} {gone.why}: {then}")
        return found

    def _answer_those_who_leave(self, others_signalled: bool) -> None:
        """A rank that a signal has reached trains on until it hears whether all end, or it alone. All do where the signal was for all, or
        the others could not go on.

        Args:
            others_signalled: the launcher of another node has handed on a signal for all.
        """
        if self._ending:
            return
        if not (self._for_all or others_signalled):
            if int(self._store.add(stores.LEAVING, 0)) == self._answered:
                return
            now = time.monotonic()
            told = [rank for rank in self._running if self._store.check([stores.leaving(rank)])]
            self._asked = {rank: self._asked.get(rank, now) for rank in told if rank not in self._leave}
            if not self._asked or now - min(self._asked.values()) < LEAVE_SECONDS:
                return
            if not self._why_not(len(self._running) - len(told)):
                for rank in self._asked:
                    name = stores.said(self._store, stores.leaving(rank), r"SIG[A-Z0-9]+")
                    self._leave[rank] = f"told to leave by {name}"
                    self._store.set(f"{stores.leaving(rank)}/alone", "1")
                    self._answered += 1
                return
        self._ending = True
        self._store.set(stores.ENDING, "1")

    def _take_newcomers(self) -> None:
        """Gives the seat of a node that is gone to one that has come since."""
        while (
            self._nodes is not None and self._generation and self.signalled is None and self.attempts.left > 0
            and (seat := self._nodes.newcomer()) is not None
        ):  # fmt: skip
            to_stderr(f"launch: node {self._nodes.address(seat)} has come: its ranks will be {named(list(seat.span))}")
            self._replace(seat.span)
            self._make_so()

    def _why_not(self, left: int) -> str:
        """Why those that are left cannot go on without the others."""
        if not self.live:
            return "there is no --live"
        keys = [stores.ready(rank) for rank in range(size(self._seats))]
        self._all_ready = self._all_ready or self._store.check(keys)
        if not self._all_ready:
            return "not all ranks had begun"
        if left < self._min_ranks:
            return f"{left} would remain, and --min-ranks is {self._min_ranks}"
        return "others have ended" if self._leaving else ""

    def _go_on(self, lost: Iterable[int], said: list[str], of_nodes: set[int]) -> bool:
        """Tells those that remain to go on without these. False, with a word, where they cannot."""
        if why := self._why_not(len(self._running)):
            to_stderr(f"launch: no rank continues without rank {named(sorted(lost))}: {why}")
            return False
        self._announce()
        to_stderr(f"launch: {'; '.join(said)}: {len(self._running)} of {size(self._seats)} ranks continue")
        self._counted = False
        for rank in sorted(lost):
            if rank not in of_nodes:
                self._replace([rank])
        self._make_so()
        return True

    def _look(self) -> tuple[dict[int, tuple[int, bool]], NodeEvents]:
        """Of the ranks that have ended: rank → exit code, and whether by a signal that was handed on. And what is new elsewhere."""
        ended = {
            place: (code, -code in self.held.delivered)
            for place, code in self._processes.ended(NODE_LOOK_SECONDS).items()
        }
        news = NodeEvents() if self._nodes is None else self._nodes.look()
        if news.signalled and not self.live and self.signalled is None:
            end = self._over if news.signalled == signal.SIGALRM else self._forward
            end(news.signalled, None)
        found: dict[int, tuple[int, bool]] = {}
        for place, (code, handed_on) in {**ended, **news.ended}.items():
            if handed_on and code == -signal.SIGKILL:
                self.overdue.add(place.rank)
            if self._running.get(place.rank) == place:
                del self._running[place.rank]
                # What a replacement was started with is right for the others.
                found[place.rank] = (EXIT_FAILED if code == EXIT_USAGE and place.replacement else code, handed_on)
            elif self._spares.get(place.rank) == place:
                del self._spares[place.rank]
                if self.signalled is None:
                    to_stderr(
                        f"launch: the replacement of rank {place.rank} {how(code)}: the others train on without it"
                    )
        self.held.release(self._pids())
        self.hangs.look([place.rank for place in self._processes.places if self._running.get(place.rank) == place])
        return found, news

    def _stopped(self, elsewhere: list[int]) -> dict[int, int]:
        """The ranks that have stood stopped for too long, while others ran: rank → the code for that.

        Time in which this process is stopped itself does not count.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 4 * NODE_LOOK_SECONDS), now
        still = [rank for rank in (*self._processes.stopped(), *elsewhere) if rank in self._running]
        if len(still) == len(self._running):
            still = []  # somebody has suspended the job
        self._still = {rank: self._still.get(rank, 0.0) + passed for rank in still}
        late = [rank for rank, seconds in self._still.items() if seconds >= self.lost_seconds]
        for rank in late:
            del self._running[rank]
        return dict.fromkeys(late, -signal.SIGSTOP)

    def _end(self, failed: Mapping[int, int]) -> dict[int, int]:
        """Ends the ranks that run: rank → exit code, of those that fail at it."""
        codes: dict[int, int] = {}
        self._stops = True

        def look() -> None:
            ended, news = self._look()
            codes.update((rank, code) for rank, (code, _) in ended.items())
            for gone in news.gone:
                if not gone.leaves and self._nodes is not None:
                    self._nodes.leave(gone.seat)

        deadline = time.monotonic() + ERROR_SECONDS
        while raising([*failed.values(), *(None for _ in self._running)]) and time.monotonic() < deadline:
            if self.signalled is not None:
                break
            look()
        for place in self._processes.places:
            if place.rank in self._spares:
                self._processes.kill(place)
        self._spares.clear()
        saving = bool(self._ending_signal)  # the ranks have it: they have the grace, and no second one
        if not saving:
            self._processes.terminate()
        self._make_so(over=True)
        deadline = time.monotonic() + (self.grace if saving else STOP_SECONDS)
        while self._processes.places or not self._others_idle():
            look()
            if time.monotonic() > deadline:
                if saving:
                    self.overdue.update(place.rank for place in self._processes.places)
                codes.update((place.rank, code) for place, code in self._processes.kill_all().items())
            if time.monotonic() > deadline + self.lost_seconds:
                break  # the word of the next round kills what runs there
        self._processes.finish()
        return {rank: code for rank, code in codes.items() if code}

    def _others_idle(self) -> bool:
        return self._nodes is None or self._nodes.idle


@dataclass(frozen=True)
class ExitOrder:
    """How this node parts from the others."""

    final: bool
    """Another node has ended the job with this code, and no cluster shall start this one again."""
    first: bool
    """This is the node that is left first."""

    def leave(self, linger: float) -> None:
        """Returns when this node may leave: the others `linger` seconds after the first."""
        if not self.first:
            time.sleep(linger)


def run(
    args: argparse.Namespace, command: list[str], ranks: int, meeting: Meeting, attempts: Attempts,
    caught: tuple[signal.Signals, ...], hangs: Hangs,
) -> tuple[int, ExitOrder | None]:  # fmt: skip
    """The exit code of the ranks, and how the nodes part. Raises `NotMet`."""
    ours, several = args.command[0] == "run", meeting.max_nodes > 1
    processes = Workers(command, prefix=args.prefix, blocked=ours)
    of_group: dict[str, Any] = {
        "attempts": attempts, "job_id": meeting.job_id, "live": args.live, "lost_seconds": args.lost_seconds, "grace": args.grace,
        "ours": ours, "caught": caught, "time_limit": args.time_limit, "hangs": hangs,
    }  # fmt: skip
    of_head: dict[str, Any] = {"min_ranks": args.min_ranks, "join_seconds": args.join_timeout, **of_group}
    name, report = f"lockstep/nodes/{meeting.job_id}", Report(address=meeting.address, ranks=ranks)

    def link(store: TCPStore, secret: Secret, serves: bool) -> Link:  # noqa: ARG001 - as `reach` calls it
        return Link(store, name, secret, report, pace(meeting.max_nodes))

    def node(store: TCPStore, secret: Secret, serves: bool) -> Coordinator | NodeAgent:
        if not serves:
            first = [link(store, secret, serves)]
            return NodeAgent(
                processes, lambda: first.pop() if first else rendezvous.reach(meeting, False, link), report, **of_group
            )
        nodes = Nodes(
            store,
            name,
            secret,
            fewest=meeting.min_nodes,
            most=meeting.max_nodes,
            ranks=ranks,
            lost_seconds=args.lost_seconds,
        )
        return Coordinator(processes, ranks, nodes, meeting.address, **of_head)

    def final(code: int) -> bool:
        return code == EXIT_FAILED and attempts.used >= args.max_restarts

    began, group = time.monotonic(), None
    handle((*caught, signal.SIGALRM), leave_while_waiting)
    signal.setitimer(signal.ITIMER_REAL, args.time_limit)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # they were held back until here
        if several:
            group = rendezvous.reach(meeting, meeting.serves, node)
        else:
            group = Coordinator(processes, ranks, None, meeting.address, **of_head)
        group.catch()
        group.limit(began)
        if isinstance(group, NodeAgent):
            ending = group.run()
            return group.settled(ending.code, {}), ExitOrder(ending.final, ending.first == group.place)
        codes = group.run()
        code = group.settled(exit_code(codes.values()) if codes else EXIT_DONE, codes)
        return code, group.part(code, final(code), codes)
    except Interrupted as error:
        handle(caught, signal.SIG_IGN)
        over = error.number == signal.SIGALRM if group is None else group.timed_out
        code, why = interrupted(error.number, args.time_limit, over, "" if group is None else group.again)
    except NotMet as error:
        if isinstance(group, Coordinator):
            group.note(EXIT_FAILED, str(error))
            group.part(EXIT_FAILED, True, ())
        raise
    except CannotMeet as error:
        code, why = error.code, f"the nodes did not meet at {meeting.endpoint}: {str(error).splitlines()[0]}"
    except DistError as error:
        code, why = EXIT_FAILED, f"the store where ranks or nodes meet is lost: {str(error).splitlines()[0]}"
    except OSError as error:
        code, why = EXIT_FAILED, f"a rank cannot be started: {error.strerror}"
    to_stderr(f"launch: {why}")
    if not isinstance(group, Coordinator):
        return code, None
    group.note(code, why)
    with contextlib.suppress(DistError):
        return code, group.part(code, final(code), ())
    return code, None
