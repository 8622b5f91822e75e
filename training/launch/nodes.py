"""How the launchers of several nodes meet, and what they tell one another, through a store that the first one serves.

The first node's launcher decides, and says so in one document, the `DesiredState`: the nodes, and which process is to run in the place of
each rank. Each other one makes that so on its node, and says in a `Report` what it sees there. Both are states and not messages: one that
is read twice, late or not at all does no harm. A store authenticates no client, and everybody who reaches its port reads and writes there.
So both are JSON with an HMAC by a secret of the job. Nothing is unpickled, and what does not carry the HMAC counts as not there.

A pod that pulls its image for twenty minutes is no failure of the others, so neither the connection nor the join counts as one: both are
tried until `--join-timeout`, and a line a minute says how many nodes are missing.

A node that is not heard of for `--lost-seconds` (15 without `--live`) is lost. It has ended its own ranks by then: a launcher whose report
nobody has taken for half of that time kills them, so that no rank writes into the run directory any more when the others take over what
it did. Its clock counts from the moment at which it began to send the last report that arrived, and the first node's from when that one
came. A launcher that was stopped itself may not have been given up, as the whole job may have been stopped: it has half of its time from
then on to be heard again.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from ..contract import ENV_SECRET, EXIT_FAILED, EXIT_USAGE, MASTER_PORT, UserError, to_stderr
from ..limits import (
    HEARD_SECONDS,
    LAST_CALL_SECONDS,
    LEAVE_SECONDS,
    MISSING_NODES_SECONDS,
    NODE_LOOK_SECONDS,
    STORE_SECONDS,
)
from ..parallel import stores

NODES_AT_ONCE = 16
"""With more nodes each of them reports, and is looked at, less often."""
LEASE = 0.5
"""A launcher that is not heard kills its ranks after this part of the time after which it is taken for lost."""
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
MAX_BYTES = 1 << 20
"""Of one value. The wanted state of 8,192 ranks has about half of that."""
UNSIGNED = (
    f"{ENV_SECRET} is not set: whoever reaches {{}} can stop the job or have its ranks meet elsewhere. "
    "Set it to the same long random word on every node"
)
FOREIGN = (
    f"what stands there is not signed with this node's secret: set {ENV_SECRET} to the same value on every node, "
    "and see who else writes there"
)


class NotMet(Exception):
    """The nodes did not meet in time. To start this one again would not help."""


class CannotMeet(Exception):
    """This node can neither serve nor use the store where the nodes meet."""

    code = EXIT_FAILED


class Foreign(CannotMeet):
    """What stands in the store is not signed with this node's secret: to start this one again would not help."""

    code = EXIT_USAGE


Document = TypeVar("Document", bound=BaseModel)


class SignedStore:
    """What the nodes of a job write, below the name of the job, each value with an HMAC.

    Args:
        secret: the same on all nodes. Empty, everybody can sign: the launcher warns of that.
    """

    def __init__(self, store: Store, name: str, secret: str) -> None:
        self._name, self._store = name, PrefixStore(name, store)
        self._key = secret.encode(errors="surrogateescape")

    def set(self, key: str, text: str) -> None:
        self._store.set(key, f"{self._hmac(key, text)} {text}")

    def read(self, key: str) -> str | None:
        """Returns what a node of the job has set at this key; None where none has."""
        return self._verified(key, self.raw(key))

    def document(self, key: str, kind: type[Document]) -> Document | None:
        """Returns what `read` does as one of these; None where it is no such document."""
        with contextlib.suppress(ValidationError):
            return kind.model_validate_json(self.read(key) or "")
        return None

    def foreign(self, key: str) -> bool:
        """Returns whether something is there that no node with this secret has written."""
        raw = self.raw(key)
        return bool(raw) and self._verified(key, raw) is None

    def raw(self, key: str) -> bytes:
        """Returns the value at once, without a check; b"" where there is none."""
        return stores.read(self._store, key)

    def count(self, launchers: int) -> int:
        """Adds to the number of launchers that have come so far, and returns it. It is not signed."""
        return int(self._store.add("count", launchers))

    def set_count(self, launchers: int) -> None:
        self._store.set("count", str(launchers))

    def _verified(self, key: str, data: bytes) -> str | None:
        if len(data) > MAX_BYTES:
            return None
        with contextlib.suppress(UnicodeDecodeError):
            code, _, text = data.decode().partition(" ")
            if hmac.compare_digest(code.encode(), self._hmac(key, text).encode()):
                return text
        return None

    def _hmac(self, key: str, text: str) -> str:
        """A value is valid at its key only."""
        message = json.dumps([f"{self._name}/{key}", text]).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Meeting:
    """Which nodes meet, and where."""

    endpoint: str
    """HOST:PORT; "" of one node alone."""
    secret: str
    job_id: str
    address: str
    """This node's, as the others see it."""
    min_nodes: int
    max_nodes: int
    join_seconds: float
    """How long to wait for the others."""
    host: bool | None
    """Whether this node serves the store; None: if the endpoint has its name."""

    @property
    def serves(self) -> bool:
        return _matches_machine_hostname(self.host_and_port[0]) if self.host is None else self.host

    @property
    def host_and_port(self) -> tuple[str, int]:
        """Raises `UserError`."""
        try:
            host, port = parse_rendezvous_endpoint(self.endpoint, MASTER_PORT)
            host.encode("idna")
        except ValueError as error:  # of the encoding, too
            raise UserError(f"--rendezvous {self.endpoint!r} is not HOST:PORT: {error}") from None
        return host, port


def opened(wanted: Meeting) -> tuple[SignedStore, int]:
    """Returns the store of the node that decides, as `joined` does, where this node serves it: with 0.

    One node alone has the store in its memory. Raises `CannotMeet`, and `NotMet` as `joined`.
    """
    if wanted.max_nodes == 1:
        return _signed(wanted, HashStore(), 0)
    if not wanted.serves:
        return joined(wanted)
    if not wanted.secret:
        to_stderr(f"launch: warning: {UNSIGNED.format(wanted.endpoint)}")
    try:
        # Where only the name has matched, another launcher on this machine may serve it.
        with contextlib.suppress(*(() if wanted.host else (OSError, ValueError, RuntimeError))):
            return _signed(wanted, _tcp_store(wanted, serves=True), 0)
        return _signed(wanted, _tcp_store(wanted, serves=False), 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotMeet(str(error)) from error


def joined(wanted: Meeting) -> tuple[SignedStore, int]:
    """Returns the store where the nodes meet, and the number of this launcher among those that have come, as soon as a node serves it.

    Raises:
        NotMet: no node has served it within the join timeout.
    """
    timeout, address = wanted.join_seconds, wanted.host_and_port
    began = last_report = time.monotonic()
    while True:
        try:
            # In Python first: a signal ends this wait at once, and not the one in torch's store.
            socket.create_connection(address, 5).close()
            return _signed(wanted, _tcp_store(wanted, serves=False), 1)
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, RuntimeError) as error:  # torch's DistError among them
            problem = str(error).splitlines()[0]
        now = time.monotonic()
        if now - began >= timeout:
            raise NotMet(f"there was no answer at {wanted.endpoint} for {timeout:g} s: {problem}")
        if now - last_report >= MISSING_NODES_SECONDS:
            last_report = now
            to_stderr(f"launch: no answer at {wanted.endpoint} yet ({problem}): {waiting(now - began, timeout)}")
        time.sleep(min(1.0, max(0.0, timeout - (now - began))))


def _tcp_store(wanted: Meeting, serves: bool) -> Store:
    """The store listens on the one address that was named."""
    seconds = max(1.0, min(wanted.join_seconds, STORE_SECONDS))
    return stores.tcp_store(*wanted.host_and_port, serves=serves, seconds=seconds)


def _signed(wanted: Meeting, store: Store, launchers: int) -> tuple[SignedStore, int]:
    signed = SignedStore(store, f"lockstep/nodes/{wanted.job_id}", wanted.secret)
    count = signed.count(launchers)
    return signed, count if launchers else 0  # another launcher may have come before the one that serves has counted


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Report(_Document):
    """What a launcher reports that is, or wants to be, a node of the job."""

    address: str
    ranks: Annotated[int, Field(ge=1, lt=10_000)]
    """How many it would run."""
    round: str = ""
    """The round of the state that the launcher follows."""
    beat: _Count = 0
    """The next report has a higher one."""
    ended: list[tuple[_Count, _Count, int, bool]] = []
    """The ends in this round: rank, replacement, exit code, and whether by a signal that this node's launcher had handed on."""
    stopped: list[_Count] = []
    """Ranks that stand stopped."""
    leaves: bool = False
    """It was told to."""
    signalled: _Count = 0
    """The signal for all ranks that its launcher has handed on; SIGALRM: its time limit is over."""
    idle: bool = False
    """None of its ranks runs."""


class NodeSlot(_Document):
    """A node's place in the job: its ranks."""

    number: _Count
    """The number by which the slot's launcher reports. 0: the first node, or a slot whose node is gone."""
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
    """What the first node wants: which process runs in the place of each rank. All ranks are to end where it wants none."""

    version: _Count = 0
    """Each state of a job has a higher one: somebody who reaches the store could put an earlier one back."""
    round: str
    """Names one start of all ranks. The state of another round ends those that run."""
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
    ending: Ending | None = None
    """In a round without ranks."""


@dataclass(frozen=True)
class WorkerId:
    """A rank and the process in its place: 0 for the one that it was started with, or the number of the replacement."""

    rank: int
    replacement: int = 0


def pace(nodes: int) -> float:
    """Returns the seconds between two reports of each node, of that many."""
    return NODE_LOOK_SECONDS * max(1.0, nodes / NODES_AT_ONCE)


def size(slots: list[NodeSlot]) -> int:
    return sum(slot.ranks for slot in slots)


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

    slot: NodeSlot
    address: str
    why: str
    leaves: bool
    """It was told to: nothing is lost yet."""


@dataclass
class NodeEvents:
    """What one look at the other nodes has shown."""

    ended: dict[WorkerId, tuple[int, bool]] = field(default_factory=dict)
    """Exit code, and whether by a signal that was handed on."""
    stopped: list[int] = field(default_factory=list)
    lost: list[LostNode] = field(default_factory=list)
    signalled: int = 0
    """A signal for all ranks that another node's launcher has handed on."""


class Nodes:
    """The other nodes, as the first one sees them. A job of one node has none.

    Args:
        store: which this process serves, or has alone.
        ranks: of this node.
        lost_seconds: a node that is not heard of is lost after this time.
    """

    def __init__(self, store: SignedStore, meeting: Meeting, *, ranks: int, lost_seconds: float) -> None:
        self._store, self._meeting, self._lost_seconds = store, meeting, lost_seconds
        self._others: dict[int, _Other] = {}
        self._asked, self._missing = 0, list[int]()
        self._max_new = 4 * meeting.max_nodes + 64
        """Nodes that are looked for at once."""
        self.slots = [NodeSlot(number=0, first=0, ranks=ranks)]
        """The first one is this node's."""
        self._state = DesiredState(round="", seats=[], wanted=[], master=("", 0), restarts=0, max_restarts=0)
        self._looked = -math.inf

    def gather(self, over: Callable[[], bool]) -> None:
        """Waits for the nodes, and gives each a slot, those of the last round first. Raises `NotMet`.

        Args:
            over: asked while waiting; whether to end that.
        """
        began = last_report = time.monotonic()
        last_call: float | None = None
        fewest, most, seconds = self._meeting.min_nodes, self._meeting.max_nodes, self._meeting.join_seconds
        while True:
            self._look()
            here = [
                number
                for number, other in sorted(self._others.items())
                if other.came >= began and self._may_join(other)  # an earlier report may be of a node that is gone
            ]
            now, missing = time.monotonic(), fewest - 1 - len(here)
            last_call = None if missing > 0 else last_call or now + LAST_CALL_SECONDS
            if len(here) + 1 >= most or (last_call is not None and now >= last_call) or over():
                break
            if missing > 0 and now - began > seconds:
                raise NotMet(f"{missing} of {fewest} nodes did not come within {seconds:g} s")
            if missing > 0 and now - last_report > MISSING_NODES_SECONDS:
                last_report = now
                to_stderr(
                    f"launch: {len(here) + 1} of {fewest} nodes are here, {missing} missing: {waiting(now - began, seconds)}"
                )
            time.sleep(NODE_LOOK_SECONDS)
        chosen = sorted(here, key=lambda number: (not self._has_slot(number), number))[: most - 1]
        slots = self.slots[:1]
        for number in sorted(chosen, key=lambda number: self._others[number].report.address):
            slots.append(NodeSlot(number=number, first=size(slots), ranks=self._others[number].report.ranks))
            self._others[number].taken = 0
        self.slots = slots

    def announce(self, state: DesiredState) -> None:
        self._state = state.model_copy(update={"version": self._state.version + 1})
        self._write()

    def look(self) -> NodeEvents:
        """Returns what is new on the nodes that have a slot."""
        self._look()
        events = NodeEvents()
        for slot in self.slots:
            if (other := self._others.get(slot.number)) is None:
                continue
            report = other.report
            if report.round == self._state.round:
                for rank, replacement, code, handed_on in report.ended[other.taken :]:
                    if rank in slot.span:
                        events.ended[WorkerId(rank, replacement)] = (code, handed_on)
                other.taken = len(report.ended)
                events.stopped += report.stopped
                events.signalled = events.signalled or report.signalled
            leaves = other.leaving > LEAVE_SECONDS
            if leaves or other.silent > self._lost_seconds:
                why = "was told to leave" if leaves else f"was not heard of for {self._lost_seconds:g} s"
                events.lost.append(LostNode(slot, report.address, why, leaves))
        return events

    def leave(self, slot: NodeSlot) -> None:
        """The job continues without the node that had this slot."""
        self.slots[self.slots.index(slot)] = slot.model_copy(update={"number": 0})
        self._others.pop(slot.number, None)

    def newcomer(self) -> NodeSlot | None:
        """Returns a slot whose node was gone, and that a node has taken which has come since."""
        for index, slot in enumerate(self.slots):
            if index == 0 or slot.number:
                continue
            for number, other in self._others.items():
                if other.report.ranks == slot.ranks and not self._has_slot(number) and self._may_join(other):
                    self.slots[index] = taken = slot.model_copy(update={"number": number})
                    other.taken = 0
                    return taken
        return None

    @property
    def more(self) -> bool:
        """Whether a node has come for which the job has a place still."""
        return len(self.slots) < self._meeting.max_nodes and any(
            self._may_join(other) for number, other in self._others.items() if not self._has_slot(number)
        )

    def _may_join(self, other: _Other) -> bool:
        return not other.report.leaves and other.silent < self._lost_seconds / 2

    def address(self, slot: NodeSlot) -> str:
        return self._others[slot.number].report.address

    @property
    def idle(self) -> bool:
        """Whether no rank of this round runs on another node."""
        return all(self._is_idle(other) for number, other in self._others.items() if self._has_slot(number))

    def _is_idle(self, other: _Other) -> bool:
        return other.report.idle and other.report.round == self._state.round

    def part(self, ending: Ending) -> None:
        """Announces how the job has ended. Returns when the others have read that, or do not answer."""
        self.announce(self._state.model_copy(update={"round": uuid.uuid4().hex, "wanted": [], "ending": ending}))
        deadline = time.monotonic() + HEARD_SECONDS
        while time.monotonic() < deadline and not all(
            self._is_idle(other) for other in self._others.values() if other.silent < self._lost_seconds / 2
        ):
            self._look()
            time.sleep(NODE_LOOK_SECONDS)

    def _write(self) -> None:
        """Again and again: others who reach the store may have put something else there."""
        self._store.set("open", "")
        if self._state.version:
            self._store.set("word", self._state.model_dump_json())

    def _count(self) -> int:
        """Returns how many nodes have come so far. Others who reach the store may have put something else there."""
        text = self._store.raw("count")
        if text.isdigit() and len(text) < 10 and 0 <= int(text) - self._asked <= self._max_new:
            return int(text)
        self._store.set_count(self._asked)
        return self._asked

    def _has_slot(self, number: int) -> bool:
        return any(slot.number == number for slot in self.slots)

    def _look(self) -> None:
        now, seconds = time.monotonic(), pace(self._meeting.max_nodes)
        if self._meeting.max_nodes == 1 or now - self._looked < seconds / 2:
            return
        # This process may have been stopped meanwhile, and its store with it.
        passed, self._looked = min(now - self._looked, 10 * seconds), now
        self._write()
        count = self._count()
        self._missing += range(self._asked + 1, count + 1)
        self._asked = count
        for number in self._missing:
            if (report := self._store.document(f"report/{number}", Report)) is not None:
                self._others[number] = _Other(report)
        self._missing = [number for number in self._missing if number not in self._others][-self._max_new :]
        for number, other in list(self._others.items()):
            report = self._store.document(f"report/{number}", Report)
            if report is not None and report.beat > other.report.beat:
                other.report, other.silent, other.came = report, 0.0, now
            else:
                other.silent += passed
            other.leaving = other.leaving + passed if other.report.leaves else 0.0
            if other.silent > self._lost_seconds and not self._has_slot(number):
                del self._others[number]


def waiting(elapsed: float, timeout: float) -> str:
    return f"waiting, {elapsed:.0f} s of {timeout:.0f} s"
