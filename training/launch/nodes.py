"""What the launchers of several nodes tell one another, through a store that the first one serves.

The first node's launcher decides, and says so in one document, the `DesiredState`: the nodes, and which process is to run in the place of
each rank. Each other one makes that so on its node, and says in a `Report` what it sees there. Both are states and not messages: one that
is read twice, late or not at all does no harm. Both carry an HMAC by the job's secret (`rendezvous.py`).

A node that is not heard of for `--lost-seconds` (15 without `--live`) is lost. It has ended its own ranks by then: a launcher whose report
nobody has taken for half of that time kills them, so that no rank writes into the run directory any more when the others take over what
it did. Its clock counts from the moment at which it began to send the last report that arrived, and the first node's from when that one
came. A launcher that was stopped itself may not have been given up, as the whole job may have been stopped: it has half of its time from
then on to be heard again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed import TCPStore

from ..contract import ENV_LIVE, to_stderr
from ..limits import HEARD_SECONDS, LAST_CALL_SECONDS, LEAVE_SECONDS, MISSING_NODES_SECONDS, NODE_LOOK_SECONDS
from .rendezvous import NotMet, Secret, SignedStore, waiting
from .workers import WorkerId

NODES_AT_ONCE = 16
"""With more nodes each of them reports, and is looked at, less often."""
LEASE = 0.5
"""A launcher that is not heard kills its ranks after this part of the time after which it is taken for lost."""
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Report(_Document):
    """Of a launcher that is, or wants to be, a node of the job."""

    address: str
    ranks: Annotated[int, Field(ge=1, lt=10_000)]
    """How many it would run."""
    round: str = ""
    """Of the word that it follows."""
    beat: _Count = 0
    """The next report has a higher one."""
    ended: list[tuple[_Count, _Count, int, bool]] = []
    """Of this round: rank, replacement, exit code, and whether by a signal that this node's launcher had handed on."""
    stopped: list[_Count] = []
    """Ranks that stand stopped."""
    leaves: bool = False
    """It was told to."""
    signalled: _Count = 0
    """The signal for all ranks that its launcher has handed on; SIGALRM: its time limit is over."""
    idle: bool = False
    """None of its ranks runs."""
    parts: bool = False
    """It has read how the job has ended, and needs the store no more."""


class NodeSlot(_Document):
    """A node's place in the job: its ranks."""

    number: _Count
    """Of the launcher that has it, by which it reports. 0: the first node's, and that of a seat whose node is gone."""
    first: _Count
    ranks: _Count

    @property
    def span(self) -> range:
        """Its ranks."""
        return range(self.first, self.first + self.ranks)


class Ending(_Document):
    """How the job has ended."""

    code: _Count
    final: bool
    """No cluster shall start a node again."""
    first: int
    """The seat that is left first."""


class DesiredState(_Document):
    """Of the first node."""

    version: _Count = 0
    """Each word of a job has a higher one: somebody who reaches the store could put an earlier one back."""
    round: str
    """Names one start of all ranks. The word of another round ends those that run."""
    seats: list[NodeSlot]
    """The first is that of the node that says this."""
    wanted: list[tuple[_Count, _Count]]
    """Rank and replacement, of all processes that are to run."""
    master: tuple[str, _Count]
    """The ranks' store."""
    restarts: _Count
    max_restarts: _Count
    signal: _Count = 0
    """That the first node has got, for all ranks."""
    over: bool = False
    """All ranks are to end."""
    ending: Ending | None = None


def pace(nodes: int) -> float:
    """Seconds between two reports of each node, of that many."""
    return NODE_LOOK_SECONDS * max(1.0, nodes / NODES_AT_ONCE)


def size(seats: list[NodeSlot]) -> int:
    return sum(seat.ranks for seat in seats)


def environment(word: DesiredState, seat: NodeSlot, job_id: str, live_seconds: int | None) -> dict[str, str]:
    """Variables of the ranks that have this seat, but for those that differ between them. They are torchrun's.

    Args:
        live_seconds: under `--live`, the time after which a node is lost.
    """
    world, live = str(size(word.seats)), {} if live_seconds is None else {ENV_LIVE: str(live_seconds)}
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ, **live, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": str(seat.ranks),
        "GROUP_RANK": str(word.seats.index(seat)), "GROUP_WORLD_SIZE": str(len(word.seats)),
        "ROLE_NAME": "rank", "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": word.master[0], "MASTER_PORT": str(word.master[1]), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job_id, "TORCHELASTIC_RESTART_COUNT": str(word.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(word.max_restarts),
    }  # fmt: skip


def of_seat(word: DesiredState, seat: NodeSlot) -> list[WorkerId]:
    """The processes that are to run there."""
    return [WorkerId(rank, replacement) for rank, replacement in word.wanted if rank in seat.span]


@dataclass
class _Other:
    """What the first node knows of another one."""

    report: Report
    silent: float = 0.0
    """Seconds since the last report was another one."""
    came: float = field(default_factory=time.monotonic)
    """When that one came."""
    leaving: float = 0.0
    """Seconds since it has said that it was told to leave."""
    taken: int = 0
    """Endings of its report that were taken."""


@dataclass(frozen=True)
class LostNode:
    """A node that the job has to do without from here on."""

    seat: NodeSlot
    address: str
    why: str
    leaves: bool
    """It was told to: nothing is lost yet."""


@dataclass
class NodeEvents:
    """Of one look at the other nodes."""

    ended: dict[WorkerId, tuple[int, bool]] = field(default_factory=dict)
    """Exit code, and whether by a signal that was handed on."""
    stopped: list[int] = field(default_factory=list)
    gone: list[LostNode] = field(default_factory=list)
    signalled: int = 0
    """A signal for all ranks that another node's launcher has handed on."""


class Nodes:
    """The other nodes, as the first one sees them.

    Args:
        store: which this process serves.
        name: of the job there.
        fewest: nodes, with this one, with which the job begins.
        most: nodes that it takes.
        ranks: of this node.
        lost_seconds: a node that is not heard of is lost after this time.
    """

    def __init__(
        self, store: TCPStore, name: str, secret: Secret, *, fewest: int, most: int, ranks: int, lost_seconds: float,
    ) -> None:  # fmt: skip
        self._store, self._raw, self._name = SignedStore(store, name, secret), store, name
        self._fewest, self._most, self._lost_seconds = fewest, most, lost_seconds
        self._ranks = ranks
        self._others: dict[int, _Other] = {}
        self._asked, self._missing = 0, list[int]()
        self._most_new = 4 * most + 64
        """Nodes that are looked for at once."""
        self.seats: list[NodeSlot] = []
        self._word: DesiredState | None = None
        self._version = 0
        self._looked = -math.inf
        store.add(f"{name}/count", 0)

    def gather(self, seconds: float, over: Callable[[], bool]) -> list[NodeSlot]:
        """Waits for the nodes, and gives each a seat, those of the last round first. Raises `NotMet`.

        Args:
            over: asked while waiting; whether to end that.
        """
        began = told = time.monotonic()
        last_call: float | None = None
        while True:
            self._look()
            found = [
                number
                for number, other in sorted(self._others.items())
                if other.came >= began and self._may_join(other)  # an earlier report may be of a node that is gone
            ]
            now, missing = time.monotonic(), self._fewest - 1 - len(found)
            last_call = None if missing > 0 else last_call or now + LAST_CALL_SECONDS
            if len(found) + 1 >= self._most or (last_call is not None and now >= last_call) or over():
                break
            if missing > 0 and now - began > seconds:
                raise NotMet(f"{missing} of {self._fewest} nodes did not come within {seconds:g} s")
            if missing > 0 and now - told > MISSING_NODES_SECONDS:
                told = now
                to_stderr(
                    f"launch: {len(found) + 1} of {self._fewest} nodes are here, {missing} missing: {waiting(now - began, seconds)}"
                )
            time.sleep(NODE_LOOK_SECONDS)
        had = {seat.number for seat in self.seats}
        chosen = sorted(found, key=lambda number: (number not in had, number))[: self._most - 1]
        seats = [NodeSlot(number=0, first=0, ranks=self._ranks)]
        for number in sorted(chosen, key=lambda number: self._others[number].report.address):
            seats.append(NodeSlot(number=number, first=size(seats), ranks=self._others[number].report.ranks))
            self._others[number].taken = 0
        self.seats = seats
        return seats

    def say(self, word: DesiredState) -> None:
        self._version += 1
        self._word = word.model_copy(update={"version": self._version})
        self._write()

    def look(self) -> NodeEvents:
        """What is new on the nodes that have a seat."""
        assert self._word is not None
        self._look()
        news = NodeEvents()
        for seat in self.seats:
            if (other := self._others.get(seat.number)) is None:
                continue
            report = other.report
            if report.round == self._word.round:
                for rank, replacement, code, handed_on in report.ended[other.taken :]:
                    if rank in seat.span:
                        news.ended[WorkerId(rank, replacement)] = (code, handed_on)
                other.taken = len(report.ended)
                news.stopped += report.stopped
                news.signalled = news.signalled or report.signalled
            leaves = other.leaving > LEAVE_SECONDS
            if leaves or other.silent > self._lost_seconds:
                what = "was told to leave" if leaves else f"was not heard of for {self._lost_seconds:g} s"
                news.gone.append(LostNode(seat, report.address, what, leaves))
        return news

    def leave(self, seat: NodeSlot) -> None:
        """The job goes on without the node that had this seat."""
        self.seats[self.seats.index(seat)] = seat.model_copy(update={"number": 0})
        self._others.pop(seat.number, None)

    def newcomer(self) -> NodeSlot | None:
        """A seat whose node was gone, and that a node has taken which has come since."""
        for place, seat in enumerate(self.seats):
            if place == 0 or seat.number:
                continue
            for number, other in self._others.items():
                if other.report.ranks == seat.ranks and not self._has_seat(number) and self._may_join(other):
                    self.seats[place] = taken = seat.model_copy(update={"number": number})
                    other.taken = 0
                    return taken
        return None

    @property
    def more(self) -> bool:
        """A node has come for which the job has a place still."""
        return len(self.seats) < self._most and any(
            self._may_join(other) for number, other in self._others.items() if not self._has_seat(number)
        )

    def _may_join(self, other: _Other) -> bool:
        return not other.report.leaves and other.silent < self._lost_seconds / 2

    def address(self, seat: NodeSlot) -> str:
        return self._others[seat.number].report.address

    @property
    def idle(self) -> bool:
        """No rank of this round runs on another node."""
        assert self._word is not None
        reports = [other.report for number, other in self._others.items() if self._has_seat(number)]
        return all(report.idle and report.round == self._word.round for report in reports)

    def part(self, ending: Ending) -> None:
        """Says how the job has ended. Returns when the others have heard it, or do not answer."""
        word = self._word or DesiredState(round="", seats=[], wanted=[], master=("", 0), restarts=0, max_restarts=0)
        self.say(word.model_copy(update={"over": True, "wanted": [], "ending": ending}))
        deadline = time.monotonic() + HEARD_SECONDS
        while time.monotonic() < deadline and not all(
            other.report.parts
            for other in self._others.values() if other.silent < self._lost_seconds / 2
        ):  # fmt: skip
            self._look()
            time.sleep(NODE_LOOK_SECONDS)

    def _write(self) -> None:
        """Again and again: whoever reaches the store may have put something else there."""
        self._store.set("open", "")
        if self._word is not None:
            self._store.set("word", self._word.model_dump_json())

    def _count(self) -> int:
        """How many nodes have come so far. Whoever reaches the store may have put something else there."""
        key = f"{self._name}/count"
        text = bytes(self._raw.compare_set(key, "", ""))
        if text.isdigit() and len(text) < 10 and 0 <= int(text) - self._asked <= self._most_new:
            return int(text)
        self._raw.set(key, str(self._asked))
        return self._asked

    def _has_seat(self, number: int) -> bool:
        return any(seat.number == number for seat in self.seats)

    def _look(self) -> None:
        now, seconds = time.monotonic(), pace(self._most)
        if now - self._looked < seconds / 2:
            return
        # This process may have been stopped meanwhile, and its store with it.
        passed, self._looked = min(now - self._looked, 10 * seconds), now
        self._write()
        count = self._count()
        self._missing += range(self._asked + 1, count + 1)
        self._asked = count
        for number in self._missing:
            if (report := _read(self._store, f"report/{number}", Report)) is not None:
                self._others[number] = _Other(report)
        self._missing = [number for number in self._missing if number not in self._others][-self._most_new :]
        for number, other in list(self._others.items()):
            report = _read(self._store, f"report/{number}", Report)
            if report is not None and report.beat > other.report.beat:
                other.report, other.silent, other.came = report, 0.0, now
            else:
                other.silent += passed
            other.leaving = other.leaving + passed if other.report.leaves else 0.0
            if other.silent > self._lost_seconds and not self._has_seat(number):
                del self._others[number]


_Shape = TypeVar("_Shape", bound=_Document)


def _read(store: SignedStore, key: str, shape: type[_Shape]) -> _Shape | None:
    if (text := store.read(key)) is None:
        return None
    try:
        return shape.model_validate_json(text)
    except ValidationError:
        return None


class Link:
    """To the first node, from another one: sends this node's report and reads the word, again and again, in a thread.

    torch bounds a connection and not the answer to a question, so nothing here waits for the thread.

    Args:
        store: the first node's.
        name: of the job there.
        report: the first one.
        seconds: between two reports.
    """

    def __init__(self, store: TCPStore, name: str, secret: Secret, report: Report, seconds: float) -> None:
        self.number = int(store.add(f"{name}/count", 1))
        self._store = SignedStore(store, name, secret)
        self.foreign = False
        """What stands there was written with another secret."""
        self.word: DesiredState | None = None
        self.taken = time.monotonic()
        """When the last report that has arrived was sent."""
        self.broken = False
        """There is nobody at the other end."""
        self._report, self._arrived = report, -1
        self._beat, self._seconds = 0, seconds
        self._changed, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._exchange, name="nodes", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        if report != self._report.model_copy(update={"beat": report.beat}):
            self._changed.set()
        self._report = report

    def silent(self, seconds: float) -> bool:
        """Whether nobody has taken a report for this many seconds."""
        return self.broken or time.monotonic() - self.taken > seconds

    def heard_before(self, seconds: float) -> None:
        """Counts as heard this many seconds ago, where that was longer ago: this process was stopped meanwhile."""
        self.taken = max(self.taken, time.monotonic() - seconds)

    def send(self, seconds: float) -> None:
        """Returns when what was reported last has arrived, or after this time."""
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
                word = _read(self._store, "word", DesiredState)
                self.foreign = self.word is None and word is None and self._store.foreign("open")
                self.taken, self._arrived = max(self.taken, began), beat
                if word is not None and (self.word is None or word.version > self.word.version):
                    self.word = word
                self._changed.wait(self._seconds)
        except (RuntimeError, ValueError):  # torch's DistError among them
            self.broken = True
