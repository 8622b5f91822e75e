"""The rendezvous of the launchers of several nodes, and their documents, in a store that the first node serves.

The first node's launcher decides. It writes one document, the `DesiredState`: the nodes, and the process that must run for each rank.
Each other launcher applies the state to its node, and writes the node's state in a `Report`. Both are states and not messages: a state
that is read twice, late or not at all does no harm. A store authenticates no client, and everybody who reaches its port reads and writes
there. So both are JSON with an HMAC by a secret of the job. Nothing is unpickled, and a value without a valid HMAC counts as missing.

A pod that pulls its image for twenty minutes is no failure of the other nodes. So the launcher tries connection and join until
`--join-timeout`, after one line about the wait.

A node without a new report for `--lost-seconds` (15 without `--live`) is lost. It has ended its own ranks by then: a launcher whose
reports have not arrived for half of that time kills them. So no rank writes into the run directory when the others take over its work.
The node's clock starts when it began to send the last report that arrived, the first node's clock when that report came. A launcher that
was stopped may not be lost, because the whole job may have been stopped: it has half of its time from then on to reach the first node.
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
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..contract import ENV_SECRET, EXIT_FAILED, MASTER_PORT, UserError, first_line, to_stderr
from ..limits import (
    HEARD_SECONDS,
    LEAVE_SECONDS,
    MISSING_NODES_SECONDS,
    NODE_LOOK_SECONDS,
    STORE_SECONDS,
)
from ..parallel import stores

if TYPE_CHECKING:
    from torch.distributed import Store

NODES_AT_ONCE = 16
"""Number of nodes above which each node reports, and is read, less often."""
LEASE = 0.5
"""Fraction of `--lost-seconds` after which a launcher without an arrived report kills its ranks."""
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
MAX_BYTES = 1 << 20
"""Most bytes of one value. The desired state of 8,192 ranks has about half of it."""
UNSIGNED = (
    f"{ENV_SECRET} is not set: whoever reaches {{}} can stop the job or have its ranks meet elsewhere. "
    "Set it to the same long random word on every node"
)
FOREIGN = (
    f"what stands there is not signed with this node's secret: set {ENV_SECRET} to the same value on every node, "
    "and see who else writes there"
)


class CannotMeet(Exception):
    """An error for nodes that do not meet: in time, or at this store.

    Args:
        code: exit code of the launcher.
        final: whether no cluster may restart this node, because it has not failed.
    """

    def __init__(self, message: str, code: int = EXIT_FAILED, final: bool = False) -> None:
        super().__init__(message)
        self.code, self.final = code, final


Document = TypeVar("Document", bound=BaseModel)


class SignedStore:
    """The values that the nodes of a job write, under keys with the job's name, each with an HMAC.

    Args:
        secret: the same on all nodes. With an empty secret everybody can sign, and the launcher warns.
    """

    def __init__(self, store: Store, name: str, secret: str) -> None:
        from torch.distributed import PrefixStore

        self._name, self._store = name, PrefixStore(name, store)
        self._key = secret.encode(errors="surrogateescape")

    def set(self, key: str, text: str) -> None:
        self._store.set(key, f"{self._hmac(key, text)} {text}")

    def read(self, key: str) -> str | None:
        """Returns the value that a node of the job has set at this key; None: no node has."""
        return self._verified(key, self.raw(key))

    def document(self, key: str, kind: type[Document]) -> Document | None:
        """Returns the value of `read` as a document of this kind; None: it is no such document."""
        with contextlib.suppress(ValidationError):
            return kind.model_validate_json(self.read(key) or "")
        return None

    def foreign(self, key: str) -> bool:
        """Returns whether the key has a value that no node with this secret has written."""
        raw = self.raw(key)
        return bool(raw) and self._verified(key, raw) is None

    def raw(self, key: str) -> bytes:
        """Returns the value at once, without a check; b"": there is none."""
        return stores.read(self._store, key)

    def count(self, launchers: int) -> int:
        """Adds to the number of launchers that have come so far, and returns the sum. The number is not signed."""
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
        """Returns the HMAC of a value. The key is a part of it, so that a value is valid only at its key."""
        message = json.dumps([f"{self._name}/{key}", text]).encode()
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Meeting:
    """The settings of a rendezvous: the nodes and the endpoint."""

    endpoint: str
    """HOST:PORT; "": the job has one node."""
    secret: str
    job_id: str
    address: str
    """The address of this node for the others."""
    nodes: int
    """Number of nodes of the job."""
    join_seconds: float
    """Longest wait for the other nodes, in seconds."""
    host: bool | None
    """Whether this node serves the store; None: it does if the endpoint has its name."""

    @property
    def serves(self) -> bool:
        if self.host is not None:
            return self.host
        from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

        return bool(_matches_machine_hostname(self.host_and_port[0]))

    @property
    def host_and_port(self) -> tuple[str, int]:
        """(host, port) of the endpoint. Raises `UserError`."""
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        try:
            host, port = parse_rendezvous_endpoint(self.endpoint, MASTER_PORT)
            host.encode("idna")
        except ValueError as error:  # of the encoding, too
            raise UserError(f"--rendezvous {self.endpoint!r} is not HOST:PORT: {error}") from None
        return host, port


def opened(wanted: Meeting) -> tuple[SignedStore | None, int]:
    """Returns (store, 0) if this node serves the store and decides, else the result of `joined`.

    The only node of a job needs no store. Raises `CannotMeet`.
    """
    if wanted.nodes == 1:
        return None, 0
    if not wanted.serves:
        return joined(wanted)
    if not wanted.secret:
        to_stderr(f"launch: warning: {UNSIGNED.format(wanted.endpoint)}")
    try:
        # Where only the name has matched, another launcher on this machine may serve it.
        with contextlib.suppress(*(() if wanted.host else (OSError, ValueError, RuntimeError))):
            return _connected(wanted, serves=True)
        return _connected(wanted, serves=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise CannotMeet(f"the nodes did not meet at {wanted.endpoint}: {first_line(error)}") from error


def joined(wanted: Meeting) -> tuple[SignedStore, int]:
    """Waits until a node serves the store. Returns the store, and the number of this launcher among those that have come.

    Raises:
        CannotMeet: no node has served it within the join timeout.
    """
    timeout, address = wanted.join_seconds, wanted.host_and_port
    began, waits = time.monotonic(), False
    while True:
        try:
            # In Python first: a signal ends this wait at once, and not the one in torch's store.
            socket.create_connection(address, 5).close()
            return _connected(wanted, serves=False)
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, RuntimeError) as error:  # torch's DistError among them
            problem = first_line(error)
        left = began + timeout - time.monotonic()
        if left <= 0:
            why = f"there was no answer at {wanted.endpoint} for {timeout:g} s: {problem}: giving up"
            raise CannotMeet(why, final=True)
        if not waits and time.monotonic() - began >= MISSING_NODES_SECONDS:
            waits = True
            to_stderr(f"launch: waits for {wanted.endpoint}, up to {timeout:g} s ({problem})")
        time.sleep(min(1.0, left))


def _connected(wanted: Meeting, serves: bool) -> tuple[SignedStore, int]:
    """Returns a store that listens only on the address of the endpoint, and the number of this launcher, 0 if it serves the store."""
    seconds = max(1.0, min(wanted.join_seconds, STORE_SECONDS))
    store = stores.tcp_store(*wanted.host_and_port, serves=serves, seconds=seconds)
    signed = SignedStore(store, f"lockstep/nodes/{wanted.job_id}", wanted.secret)
    count = signed.count(0 if serves else 1)
    return signed, 0 if serves else count  # another launcher may have come before the one that serves has counted


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Report(_Document):
    """The report of a launcher that is, or wants to be, a node of the job."""

    address: str
    ranks: Annotated[int, Field(ge=1, lt=10_000)]
    """Number of ranks that the node would run."""
    round: str = ""
    """The round of the state that the launcher follows."""
    beat: _Count = 0
    """A counter, higher in each report."""
    ended: list[tuple[_Count, _Count, int, bool]] = []
    """Ends in this round: (rank, replacement, exit code, whether a signal that this node's launcher forwarded ended it)."""
    leaves: bool = False
    """Whether a signal has asked the node to leave."""
    signalled: _Count = 0
    """The signal for all ranks that the node's launcher has forwarded; SIGALRM: its time limit is over; 0: none."""
    idle: bool = False
    """Whether none of the node's ranks runs."""


class NodeSlot(_Document):
    """A node's place in the job: its ranks."""

    number: _Count
    """The number of the launcher that reports for the slot. 0: the first node, or a slot whose node is gone."""
    first: _Count
    ranks: _Count

    @property
    def span(self) -> range:
        """The ranks of the slot."""
        return range(self.first, self.first + self.ranks)


class Ending(_Document):
    """The end of the job."""

    code: _Count
    final: bool
    """Whether no cluster may restart a node."""
    first: int
    """The index of the slot whose node leaves first."""


class DesiredState(_Document):
    """The state that the first node wants: the process that runs for each rank. If it wants no process, all ranks end."""

    version: _Count = 0
    """A counter, higher in each state of a job: a client of the store could restore an earlier state."""
    round: str
    """The id of one start of all ranks. A state with another round ends the running ranks."""
    seats: list[NodeSlot]
    """The slots of the nodes; the first is the first node's."""
    wanted: list[tuple[_Count, _Count]]
    """(rank, replacement) of each process that must run."""
    master: tuple[str, _Count]
    """(host, port) of the ranks' store."""
    restarts: _Count
    max_restarts: _Count
    signal: _Count = 0
    """The signal for all ranks that the first node has received; 0: none."""
    ending: Ending | None = None
    """The end of the job, in a round without ranks; None: the job runs."""


@dataclass(frozen=True)
class WorkerId:
    """A rank and its process: 0 for the first process, or the number of the replacement."""

    rank: int
    replacement: int = 0


def pace(nodes: int) -> float:
    """Returns the seconds between two reports of a node, for this number of nodes."""
    return NODE_LOOK_SECONDS * max(1.0, nodes / NODES_AT_ONCE)


def size(slots: list[NodeSlot]) -> int:
    return sum(slot.ranks for slot in slots)


@dataclass
class _Other:
    """The first node's knowledge of another node."""

    report: Report
    silent: float = 0.0
    """Seconds since the last new report."""
    came: float = field(default_factory=time.monotonic)
    """Time of the last new report (`time.monotonic`)."""
    leaving: float = 0.0
    """Seconds since the node has reported that it leaves."""
    taken: int = 0
    """Number of the report's `ended` entries that were read."""


@dataclass(frozen=True)
class LostNode:
    """A node that the job has lost."""

    slot: NodeSlot
    address: str
    why: str
    leaves: bool
    """Whether a signal has asked the node to leave: its ranks still run."""


@dataclass
class NodeEvents:
    """The news of one look at the other nodes."""

    ended: dict[WorkerId, tuple[int, bool]] = field(default_factory=dict)
    """Process → (exit code, whether a forwarded signal ended it)."""
    lost: list[LostNode] = field(default_factory=list)
    signalled: int = 0
    """A signal for all ranks that another node's launcher has forwarded; 0: none."""


class Nodes:
    """The first node's view of the other nodes. A job of one node has none.

    Args:
        store: the store that this process serves; None: the job has one node.
        ranks: number of ranks of this node.
        lost_seconds: time without a new report after which a node is lost.
    """

    def __init__(self, store: SignedStore | None, meeting: Meeting, *, ranks: int, lost_seconds: float) -> None:
        self._store, self._meeting, self._lost_seconds = store, meeting, lost_seconds
        self._others: dict[int, _Other] = {}
        self._asked, self._missing = 0, list[int]()
        self._max_new = 4 * meeting.nodes + 64
        """Most newcomers that one look reads."""
        self.slots = [NodeSlot(number=0, first=0, ranks=ranks)]
        """The slots of the nodes; the first is this node's."""
        self._state = DesiredState(round="", seats=[], wanted=[], master=("", 0), restarts=0, max_restarts=0)
        self._looked = -math.inf

    def gather(self, over: Callable[[], bool]) -> None:
        """Waits for the nodes, and gives each a slot, nodes of the last round first. Raises `CannotMeet`.

        Args:
            over: called during the wait; returns whether to end the wait.
        """
        began, waits = time.monotonic(), False
        nodes, seconds = self._meeting.nodes, self._meeting.join_seconds
        while True:
            self._look()
            here = [
                number
                for number, other in sorted(self._others.items())
                if other.came >= began and self._may_join(other)  # an earlier report may be of a node that is gone
            ]
            missing = nodes - 1 - len(here)
            if missing <= 0 or over():
                break
            if time.monotonic() - began > seconds:
                why = f"{missing} of {nodes} nodes did not come within {seconds:g} s: giving up"
                raise CannotMeet(why, final=True)
            if not waits and time.monotonic() - began >= MISSING_NODES_SECONDS:
                waits = True
                to_stderr(f"launch: waits for {missing} of {nodes} nodes, up to {seconds:g} s")
            time.sleep(NODE_LOOK_SECONDS)
        chosen = sorted(here, key=lambda number: (not self._has_slot(number), number))[: nodes - 1]
        slots = self.slots[:1]
        for number in sorted(chosen, key=lambda number: self._others[number].report.address):
            slots.append(NodeSlot(number=number, first=size(slots), ranks=self._others[number].report.ranks))
            self._others[number].taken = 0
        self.slots = slots

    def announce(self, state: DesiredState) -> None:
        self._state = state.model_copy(update={"version": self._state.version + 1})
        if self._store is not None:
            self._write(self._store)

    def look(self) -> NodeEvents:
        """Returns the news of the nodes that have a slot."""
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
                events.signalled = events.signalled or report.signalled
            leaves = other.leaving > LEAVE_SECONDS
            if leaves or other.silent > self._lost_seconds:
                why = "was told to leave" if leaves else f"was not heard of for {self._lost_seconds:g} s"
                events.lost.append(LostNode(slot, report.address, why, leaves))
        return events

    def leave(self, slot: NodeSlot) -> None:
        """Empties the slot of a node without which the job continues."""
        self.slots[self.slots.index(slot)] = slot.model_copy(update={"number": 0})
        self._others.pop(slot.number, None)

    def newcomer(self) -> NodeSlot | None:
        """Returns a slot whose node was gone, after it was given to a node that has come since; None: there is none."""
        for index, slot in enumerate(self.slots):
            if index == 0 or slot.number:
                continue
            for number, other in self._others.items():
                if other.report.ranks == slot.ranks and not self._has_slot(number) and self._may_join(other):
                    self.slots[index] = taken = slot.model_copy(update={"number": number})
                    other.taken = 0
                    return taken
        return None

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
        """Announces the end of the job. Returns when the others have read it, or do not answer."""
        self.announce(self._state.model_copy(update={"round": uuid.uuid4().hex, "wanted": [], "ending": ending}))
        deadline = time.monotonic() + HEARD_SECONDS
        while time.monotonic() < deadline and not all(
            self._is_idle(other) for other in self._others.values() if other.silent < self._lost_seconds / 2
        ):
            self._look()
            time.sleep(NODE_LOOK_SECONDS)

    def _write(self, store: SignedStore) -> None:
        """Writes the desired state. The caller repeats it, since other clients of the store may have overwritten the state."""
        store.set("open", "")
        if self._state.version:
            store.set("word", self._state.model_dump_json())

    def _count(self, store: SignedStore) -> int:
        """Returns the number of launchers that have come so far. Other clients of the store may have overwritten it."""
        text = store.raw("count")
        if text.isdigit() and len(text) < 10 and 0 <= int(text) - self._asked <= self._max_new:
            return int(text)
        store.set_count(self._asked)
        return self._asked

    def _has_slot(self, number: int) -> bool:
        return any(slot.number == number for slot in self.slots)

    def _look(self) -> None:
        now, seconds, store = time.monotonic(), pace(self._meeting.nodes), self._store
        if store is None or now - self._looked < seconds / 2:
            return
        # This process may have been stopped meanwhile, and its store with it.
        passed, self._looked = min(now - self._looked, 10 * seconds), now
        self._write(store)
        count = self._count(store)
        self._missing += range(self._asked + 1, count + 1)
        self._asked = count
        for number in self._missing:
            if (report := store.document(f"report/{number}", Report)) is not None:
                self._others[number] = _Other(report)
        self._missing = [number for number in self._missing if number not in self._others][-self._max_new :]
        for number, other in list(self._others.items()):
            report = store.document(f"report/{number}", Report)
            if report is not None and report.beat > other.report.beat:
                other.report, other.silent, other.came = report, 0.0, now
            else:
                other.silent += passed
            other.leaving = other.leaving + passed if other.report.leaves else 0.0
            if other.silent > self._lost_seconds and not self._has_slot(number):
                del self._others[number]
