"""The two ways in which torch's agent learns its world: alone on a machine, or with other nodes through a store.

torch's own rendezvous keeps its state as a pickle in a store that everybody may write who reaches the port. Alone, a node needs
neither store nor port. With others torch's rules stay, and what is kept is JSON with an HMAC.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timedelta
from typing import Any

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
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

from lockstep.training.launch.signed import FOREIGN, LOOK_SECONDS, Secret, SignedStore

BEAT_SECONDS = 5
LOST_BEATS = 3
"""A node that is not heard of during this number of beats is lost."""


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
            found, written = self._swap(b"", b""), False
            if not found:
                time.sleep(LOOK_SECONDS)  # torch asks again at once
        elif self._dirty:
            wanted = self._secret.signed(self._place, encode(self._state))
            written = self._swap(self._token, wanted) == wanted
            found = wanted if written else self._swap(b"", b"")
        elif self._last_sync_time >= max(time.monotonic() - self._cache_duration, 0):
            return None
        else:
            found = self._swap(b"", b"")
        text = self._secret.opened(self._place, found)
        state = decode(text) if text is not None else None
        if state is None and found and not self._known:
            raise RendezvousStateError(FOREIGN)
        ours_stays = state is None and self._known
        self._state = self._state if ours_stays else state or _RendezvousState()
        self._known = self._known or state is not None
        self._token, self._dirty, self._last_sync_time = found, ours_stays, time.monotonic()
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


def encode(state: _RendezvousState) -> str:
    """The state as JSON; the same state gives the same text."""
    nodes = []
    for node, heard in sorted(state.last_heartbeats.items()):
        place = _PARTICIPANT if node in state.participants else _WAITING if node in state.wait_list else _SPARE
        nodes.append([node.addr, node.pid, node.local_id, place, state.participants.get(node, 0), heard.isoformat()])
    deadline = None if state.deadline is None else state.deadline.isoformat()
    return json.dumps([state.round, state.complete, state.closed, deadline, nodes])


def decode(text: str) -> _RendezvousState | None:
    """The inverse of `encode`; None for any other text."""
    state = _RendezvousState()
    try:
        count, complete, closed, deadline, nodes = json.loads(text)
        if type(complete) is not bool or type(closed) is not bool:
            return None
        state.round, state.complete, state.closed = _count(count), complete, closed
        state.deadline = None if deadline is None else _time(deadline)
        for address, pid, number, place, rank, heard in nodes:
            if type(address) is not str:
                return None
            node = _NodeDesc(address, _count(pid), _count(number))
            state.last_heartbeats[node] = _time(heard)
            if place == _PARTICIPANT:
                state.participants[node] = _count(rank)
            elif place in (_WAITING, _SPARE):
                (state.wait_list if place == _WAITING else state.redundancy_list).add(node)
            else:
                return None
    except (ValueError, TypeError, RecursionError):
        return None
    return state


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError
    return value


def _time(value: Any) -> datetime:
    found = datetime.fromisoformat(value)
    if found.utcoffset() is None:  # it could not be compared with others
        raise ValueError
    return found
