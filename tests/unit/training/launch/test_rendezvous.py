"""What nodes keep in the store where they meet: JSON with an HMAC, and nothing else is believed."""

from __future__ import annotations

import base64
import os
import pickle
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from lockstep.training.launch.command import node_address
from lockstep.training.launch.rendezvous import MOST_BYTES, Secret, Several, SignedStore, encode
from lockstep.training.parallel import stores

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)


def _state() -> _RendezvousState:
    state = _RendezvousState()
    a, b, c = (_NodeDesc(f"node-{name}", number, 0) for number, name in enumerate("abc"))
    state.round, state.complete, state.deadline = 3, True, NOW + timedelta(seconds=1)
    state.participants, state.wait_list, state.redundancy_list = {a: 1}, {b}, {c}
    state.last_heartbeats = dict.fromkeys((a, b, c), NOW)
    return state


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher has it
    return stores.tcp_store("127.0.0.1", 0, serves=True, seconds=2)


def test_only_who_has_the_secret_is_believed_and_only_at_that_place(served: dist.TCPStore) -> None:
    ours, others = (SignedStore(served, "job/0", Secret(text)) for text in ("ours", "another"))
    ours.set("said", "five")
    assert (ours.read("said"), ours.get("said"), others.read("said")) == ("five", b"five", None)
    raw = served.get("job/0/said").decode()
    for key, value in (
        ("job/0/moved", raw), ("job/1/said", raw), ("job/0/bytes", "five"), ("job/0/none", ""),
        ("job/0/long", "x" * (MOST_BYTES + 1)), ("job/0/more", f"{raw} "),
    ):  # fmt: skip
        served.set(key, value)
    assert [ours.read(key) for key in ("moved", "bytes", "none", "long", "more", "never-set")] == [None] * 6
    assert SignedStore(served, "job/1", Secret("ours")).read("said") is None
    with pytest.raises(RendezvousStateError, match="no node has written 'moved'"):
        ours.get("moved")


def _node(served: dist.TCPStore, secret: str = "ours", nodes: int = 1, serves: bool = True) -> Several:
    options = {"join_timeout": 10, "last_call_timeout": 1}
    wanted = RendezvousParameters("lockstep", "", "job", nodes, 2, "here", **options)
    return Several(wanted, served, Secret(secret), serves)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.promise("other-users")
@pytest.mark.parametrize("secret", ["ours", ""])
def test_a_node_that_has_joined_writes_over_what_others_write(
    served: dist.TCPStore, tmp_path: Path, secret: str
) -> None:
    node = _node(served, secret)
    assert node.next_rendezvous().world_size == 1
    bomb = pickle.dumps(_Bomb(tmp_path / "ran"))
    key = "lockstep/nodes/job"
    own = served.get(key)
    for value in (bomb, base64.b64encode(bomb), b"", b"x" * (2 << 20), encode(_state()).encode(), b"\xff"):
        served.set(key, value)  # type: ignore[arg-type]
        node._state_holder._last_sync_time = -1  # type: ignore[attr-defined]
        assert (node.num_nodes_waiting(), node.present) == (0, 1)
        assert (node.num_nodes_waiting(), served.get(key)) == (0, own)
    served.delete_key(key)
    node._state_holder._last_sync_time = -1  # type: ignore[attr-defined]
    assert [node.num_nodes_waiting() for _ in range(2)] == [0, 0] and served.get(key) == own
    assert node.shutdown() and not (tmp_path / "ran").exists()


def test_a_node_that_comes_believes_nothing_that_is_not_signed(served: dist.TCPStore) -> None:
    served.set("lockstep/nodes/job", "nonsense")
    with pytest.raises(RendezvousStateError, match="LOCKSTEP_SECRET"):
        _node(served, serves=False).next_rendezvous()


def test_only_the_node_that_serves_begins_the_state(served: dist.TCPStore) -> None:
    """One with another secret that came first was believed, and the node that serves was refused."""
    stranger, server = _node(served, "another", serves=False), _node(served)
    stranger._state_holder.mark_dirty()
    assert stranger._state_holder.sync() is False
    assert server.next_rendezvous().world_size == 1
    with pytest.raises(RendezvousStateError, match="LOCKSTEP_SECRET"):
        stranger._state_holder.sync()
    assert server.shutdown()


@pytest.mark.promise("k8s-runs")
@pytest.mark.parametrize(
    ("master", "expected"), [("", "n-1"), ("job-master-0", "n-1"), ("job-node-0-0.job", "n-1.job"), ("10.0.0.5", "n-1")]
)
def test_a_node_is_found_in_the_masters_domain(master: str, expected: str) -> None:
    """The emulated kubelet gives each node an address; on a cluster it is this one."""
    assert node_address({"PET_MASTER_ADDR": master} if master else {}, "n-1") == expected
