"""Where the nodes of a job meet: torch's rules, which wait for a late node until the join timeout. One node alone meets nobody.

A pod that pulls its image for twenty minutes is no failure of the others, so neither the connection nor the join
counts as one: both are tried until `join_timeout`, and a line a minute says how many nodes are missing.

torch's own rendezvous keeps its state as a pickle in a store that everybody may write who reaches the port: it asks nobody who he
is. Alone, a node needs neither store nor port. With others torch's rules stay, and what nodes write is text with an HMAC by a secret
of the job. Nothing is unpickled, and what does not carry the HMAC counts as not there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import json
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from ..contract import ENV_SECRET, MASTER_PORT, UserError, say
from ..parallel import stores

REPORT_SECONDS = 60.0
"""Between two lines about nodes that are missing."""
READ_SECONDS = 60.0
"""Bound on a question to the store."""
BEAT_SECONDS = 5
LOST_BEATS = 3
"""A node that is not heard of during this number of beats is lost."""
MOST_BYTES = 1 << 20
"""Of one value. The state of 4,096 nodes has about half of that."""
LOOK_SECONDS = 0.05
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


class Secret:
    """Signs what this node writes, and tells whether a node of the job has written a text.

    Args:
        text: the same on all nodes. Empty, everybody can sign: the launcher warns of that.
    """

    def __init__(self, text: str) -> None:
        self._key = text.encode(errors="surrogateescape")

    def signed(self, place: str, text: str) -> bytes:
        """What is kept at `place`. It is nothing worth elsewhere."""
        return f"{self._mark(place, text)} {text}".encode()

    def opened(self, place: str, data: bytes) -> str | None:
        """The inverse; None for what nobody with the secret has written for this place."""
        if len(data) > MOST_BYTES:
            return None
        with contextlib.suppress(UnicodeDecodeError):
            mark, _, text = data.decode().partition(" ")
            if hmac.compare_digest(mark.encode(), self._mark(place, text).encode()):
                return text
        return None

    def _mark(self, place: str, text: str) -> str:
        return hmac.new(self._key, json.dumps([place, text]).encode(), hashlib.sha256).hexdigest()


class SignedStore:
    """The store of one round: as much of torch's interface as torch's agent uses, and `read`.

    Args:
        name: of the round, with the job's in it.
    """

    def __init__(self, store: Store, name: str, secret: Secret) -> None:
        self._served, self._name, self._secret = store, name, secret
        self._store: Store = PrefixStore(name, store)
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]

    def other_connection(self) -> SignedStore:
        """The same over another connection: an unanswered question there keeps no other question waiting."""
        return SignedStore(self._served.clone(), self._name, self._secret)

    def set(self, key: str, value: str | bytes) -> None:
        text = value.decode() if isinstance(value, bytes) else value
        self._store.set(key, self._secret.signed(self._place(key), text).decode())

    def read(self, key: str) -> str | None:
        """What a node of the job has set; None where none has."""
        # With "" for "": the value at once, also where there is none. `get` would wait for one.
        return self._secret.opened(self._place(key), self._store.compare_set(key, "", ""))

    def get(self, key: str) -> bytes:
        """Waits for a node of the job to set it. Raises `RendezvousStateError` when the store's timeout is over."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (text := self.read(key)) is None:
            if time.monotonic() > deadline:
                raise RendezvousStateError(f"no node has written {key!r} in time, or somebody else writes there")
            time.sleep(LOOK_SECONDS)
        return text.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"


class Alone(RendezvousHandler):
    """A job of one node: nothing to agree on, and nothing that listens."""

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id, self._address = run_id, address

    def get_backend(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()  # in this process; torch's agent keeps the ranks' numbers there, each time they start
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, self._address))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class Several(DynamicRendezvousHandler):
    """torch's rendezvous: who joins, who is lost, who waits for the next round."""

    def __init__(self, wanted: RendezvousParameters, store: TCPStore, secret: Secret, serves: bool) -> None:
        settings = RendezvousSettings(
            wanted.run_id, wanted.min_nodes, wanted.max_nodes,
            RendezvousTimeout(*(timedelta(seconds=int(wanted.get(f"{name}_timeout"))) for name in ("join", "last_call"))),
            keep_alive_interval=timedelta(seconds=BEAT_SECONDS), keep_alive_max_attempt=LOST_BEATS,
        )  # fmt: skip
        node = self._node_desc_generator.generate(wanted.local_addr)
        self._secret = secret
        self._name = f"lockstep/nodes/{wanted.run_id}"
        super().__init__(node, settings, "lockstep", store, _State(store, self._name, settings, secret, serves))

    @property
    def present(self) -> int:
        """Nodes that have joined this round and were alive when it was last asked about."""
        return len(self._state_holder.state.participants)

    def _get_store(self) -> SignedStore:  # type: ignore[override]
        assert isinstance(self._store, TCPStore)
        return SignedStore(self._store, f"{self._name}/{self._state_holder.state.round}", self._secret)


class _State(_BackendRendezvousStateHolder):
    """The state that the nodes share. The node that serves the store begins it: else one with another secret that comes first would
    be believed, and the right one refused. What no node has written is overwritten by the next node that has read an earlier state.
    """

    def __init__(self, store: TCPStore, place: str, settings: RendezvousSettings, secret: Secret, serves: bool) -> None:
        super().__init__(None, settings)  # type: ignore[arg-type]
        # The backend that it does without would only be used by torch's own `sync`.
        self._store, self._place, self._secret = store, place, secret
        self._token = b""
        self._known = serves
        """This node has read or written a state of the job, or is the one that begins it."""

    def sync(self) -> bool | None:
        written: bool | None = None
        if self._dirty and not self._known:
            stored, written = self._swap(b"", b""), False
            if not stored:
                time.sleep(LOOK_SECONDS)  # torch asks again at once
        elif self._dirty:
            wanted = self._secret.signed(self._place, encode(self._state))
            written = self._swap(self._token, wanted) == wanted
            stored = wanted if written else self._swap(b"", b"")
        elif self._last_sync_time >= max(time.monotonic() - self._cache_duration, 0):
            return None
        else:
            stored = self._swap(b"", b"")
        text = self._secret.opened(self._place, stored)
        state = decode(text) if text is not None else None
        if state is None and stored and not self._known:
            raise RendezvousStateError(FOREIGN)
        ours_stays = state is None and self._known
        self._state = self._state if ours_stays else state or _RendezvousState()
        self._known = self._known or state is not None
        self._token, self._dirty, self._last_sync_time = stored, ours_stays, time.monotonic()
        if not ours_stays:
            self._sanitize()
        return written

    def _swap(self, expected: bytes, desired: bytes) -> bytes:
        """What is there now. With "" for "" only reads, and does not wait where there is nothing."""
        try:
            return bytes(self._store.compare_set(self._place, expected, desired))  # type: ignore[arg-type]
        except (ValueError, RuntimeError) as error:  # torch's DistError among them
            raise RendezvousConnectionError("the connection to the store is lost") from error


_PARTICIPANT, _WAITING, _SPARE = "participant", "waiting", "spare"
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]
_Node = tuple[str, _Count, _Count, Literal["participant", "waiting", "spare"], _Count, AwareDatetime]
"""Its address, process and number there; its place and rank; when it was last heard."""
_STATE: TypeAdapter[Any] = TypeAdapter(
    tuple[_Count, bool, bool, AwareDatetime | None, list[_Node]], config=ConfigDict(strict=True)
)
"""Round, whether that is complete, whether the job has ended, until when it may be joined, the nodes."""


def encode(state: _RendezvousState) -> str:
    """The state as JSON; the same state gives the same text."""
    nodes = []
    for node, heard in sorted(state.last_heartbeats.items()):
        place = _PARTICIPANT if node in state.participants else _WAITING if node in state.wait_list else _SPARE
        nodes.append((node.addr, node.pid, node.local_id, place, state.participants.get(node, 0), heard))
    return _STATE.dump_json((state.round, state.complete, state.closed, state.deadline, nodes)).decode()


def decode(text: str) -> _RendezvousState | None:
    """The inverse of `encode`; None for any other text."""
    state = _RendezvousState()
    try:
        state.round, state.complete, state.closed, state.deadline, nodes = _STATE.validate_json(text)
    except ValueError:
        return None
    for address, pid, number, place, rank, heard in nodes:
        node = _NodeDesc(address, pid, number)
        state.last_heartbeats[node] = heard
        if place == _PARTICIPANT:
            state.participants[node] = rank
        else:
            (state.wait_list if place == _WAITING else state.redundancy_list).add(node)
    return state


def node_range(text: str) -> tuple[int, int]:
    """`--nodes`: a number, or MIN:MAX. Raises `UserError`."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(f"--nodes must be a number, or MIN:MAX with MIN ≤ MAX; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def parameters(args: argparse.Namespace, secret: str) -> RendezvousParameters:
    """Of the launcher's flags. Raises `UserError`."""
    low, high = node_range(args.nodes)
    endpoint, host = args.rendezvous, args.serve
    if high > 1 and not endpoint:
        raise UserError(f"--nodes {args.nodes} needs --rendezvous HOST:PORT, the same on every node")
    job_id = args.job_id if high > 1 else uuid.uuid4().hex
    if high == 1:
        endpoint, host = "127.0.0.1:0", True
    options = {"is_host": str(host).lower()} if host is not None else {}
    return RendezvousParameters(
        backend="lockstep", secret=secret.strip(), endpoint=endpoint, run_id=job_id, min_nodes=low, max_nodes=high,
        local_addr="127.0.0.1" if high == 1 else args.address,
        join_timeout=args.join_timeout, last_call_timeout=3 if low < high else 1,
        read_timeout=max(1, int(min(args.join_timeout, READ_SECONDS))), **options,
    )  # fmt: skip


def serves(wanted: RendezvousParameters) -> bool:
    """Whether this node serves the store where the nodes meet."""
    host = wanted.get_as_bool("is_host")
    return _matches_machine_hostname(_endpoint(wanted)[0]) if host is None else host


def _endpoint(wanted: RendezvousParameters) -> tuple[str, int]:
    """Raises `UserError`."""
    try:
        host, port = parse_rendezvous_endpoint(wanted.endpoint, MASTER_PORT)
        host.encode("idna")
    except ValueError as error:  # of the encoding, too
        raise UserError(f"--rendezvous {wanted.endpoint!r} is not HOST:PORT: {error}") from None
    return host, port


Joined = TypeVar("Joined")


def connect(wanted: RendezvousParameters, served_here: bool) -> RendezvousHandler:
    """torch's rendezvous over the store where the nodes meet, as soon as that is served. Raises as `reach` does."""
    if wanted.max_nodes == 1:
        return Alone(wanted.run_id, wanted.local_addr or "127.0.0.1")
    return reach(wanted, served_here, lambda store, secret, serves: Several(wanted, store, secret, serves))


def reach(wanted: RendezvousParameters, served_here: bool, join: Callable[[TCPStore, Secret, bool], Joined]) -> Joined:
    """What `join` gives for the store where the nodes meet, as soon as that is served.

    Args:
        served_here: what `serves` gave.
        join: is called with the store, the job's secret, and whether the store is in this process. It may raise `RuntimeError`, by which
            the connection is lost.

    Raises:
        NotMet: no node has served it within the join timeout.
        RendezvousError: this node should serve it, and cannot.
    """
    timeout = float(wanted.get("join_timeout"))
    host, port = _endpoint(wanted)
    if served_here and not wanted.get("secret"):
        say(f"launch: warning: {UNSIGNED.format(wanted.endpoint)}", sys.stderr)
    began = time.monotonic()
    last_report = began
    problem = ""
    while True:
        try:
            if not served_here:
                # Asked in Python first: a signal ends this wait at once, and not the one in torch's store.
                socket.create_connection((host, port), 5).close()
            return _joined(wanted, host, port, served_here, join)
        except RendezvousConnectionError as error:
            if served_here:
                raise
            problem = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        now = time.monotonic()
        if now - began >= timeout:
            raise NotMet(f"there was no answer at {wanted.endpoint} for {timeout:g} s: {problem}")
        if now - last_report >= REPORT_SECONDS:
            last_report = now
            say(
                f"launch: no answer at {wanted.endpoint} yet ({problem}): {_waiting(now - began, timeout)}",
                sys.stderr,
            )
        time.sleep(min(1.0, max(0.0, timeout - (now - began))))


def _joined(
    wanted: RendezvousParameters,
    host: str,
    port: int,
    served_here: bool,
    join: Callable[[TCPStore, Secret, bool], Joined],
) -> Joined:
    """The store listens on the one address that was named."""
    seconds, secret = float(wanted.get("read_timeout")), Secret(wanted.get("secret"))

    def joined(serves: bool) -> Joined:
        return join(stores.tcp_store(host, port, serves=serves, seconds=seconds), secret, serves)

    if served_here:
        try:
            return joined(serves=True)
        except (ValueError, RuntimeError) as error:
            if wanted.get_as_bool("is_host") is not None:  # else only the name matched; another process serves
                raise RendezvousError(str(error)) from error
    try:
        return joined(serves=False)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def reporting_missing(handler: RendezvousHandler) -> Iterator[None]:
    """Inside the block, a line a minute says how many nodes are missing."""
    if not isinstance(handler, Several):
        yield
        return
    wanted, timeout = handler.settings.min_nodes, handler.settings.timeout.join.total_seconds()
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(REPORT_SECONDS):
            joined = handler.present
            if joined < wanted:
                more = _waiting(time.monotonic() - began, timeout)
                say(f"launch: {joined} of {wanted} nodes are here, {wanted - joined} missing: {more}", sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    if wanted > 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if wanted > 1:
            thread.join()


def _waiting(elapsed: float, timeout: float) -> str:
    return f"waiting, {elapsed:.0f} s of {timeout:.0f} s"
