"""Nodes keep JSON with an HMAC in their rendezvous store, and ignore everything else."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.training.launch.command import node_address
from lockstep.training.launch.nodes import MAX_BYTES, CannotMeet, Meeting, SignedStore, opened
from lockstep.training.parallel import stores
from tests.processes import free_port


@pytest.fixture
def served() -> dist.TCPStore:
    return stores.tcp_store("127.0.0.1", 0, serves=True, seconds=2)


def test_only_who_has_the_secret_is_believed_and_only_at_that_place(served: dist.TCPStore) -> None:
    ours, others = (SignedStore(served, "job", text) for text in ("ours", "another"))
    ours.set("said", "five")
    assert (ours.read("said"), others.read("said")) == ("five", None)
    assert [store.foreign("said") for store in (ours, others)] == [False, True]
    raw = served.get("job/said").decode()
    for key, value in (
        ("moved", raw), ("bytes", "five"), ("long", "x" * (MAX_BYTES + 1)), ("more", f"{raw} "), ("none", ""),
    ):  # fmt: skip
        served.set(f"job/{key}", value)
        assert ours.read(key) is None and ours.foreign(key) == bool(value)
    assert ours.read("never-set") is None and not ours.foreign("never-set")
    assert SignedStore(served, "another-job", "ours").read("said") is None


def test_a_key_that_another_client_deletes_holds_no_caller_up(served: dist.TCPStore) -> None:
    """A rank that reads with `get` waits for the store's time-out, and holds the store's lock meanwhile."""
    assert stores.read(served, "deleted") == b"" and not served.check(["deleted"])
    for value in (b"\x00\xff", b"9" * 5000, b""):
        served.set("there", value)  # type: ignore[arg-type]
        assert stores.read(served, "there") == value
    assert stores.text_at(served, "there", ".*") == stores.text_at(served, "deleted", ".*") == ""


@pytest.mark.promise("k8s-runs")
@pytest.mark.parametrize(
    ("master", "expected"), [("", "n-1"), ("job-master-0", "n-1"), ("job-node-0-0.job", "n-1.job"), ("10.0.0.5", "n-1")]
)
def test_a_nodes_address_is_in_the_masters_domain(master: str, expected: str) -> None:
    """The emulated kubelet gives each node an address; on a cluster it is this one."""
    assert node_address({"PET_MASTER_ADDR": master} if master else {}, "n-1") == expected


@pytest.mark.parametrize("host", [None, True])
def test_of_two_launchers_that_would_serve_at_one_moment_one_joins(
    monkeypatch: pytest.MonkeyPatch, host: bool | None
) -> None:
    """Both have bound the port, and the other launcher listens first. A node that has to serve refuses instead."""
    with socket.socket() as bound, contextlib.ExitStack() as stack:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        server = stores.tcp_store("127.0.0.1", port, serves=True, seconds=2)
        monkeypatch.setattr(stores, "listening", lambda *_: bound.listen())
        if host:
            stack.enter_context(pytest.raises(CannotMeet))
        _, number = opened(Meeting(f"127.0.0.1:{port}", "secret", "job", "127.0.0.1", 2, 2.0, host=host))
        assert number == 1 and server.num_keys() > 0


def test_the_launcher_that_serves_decides_even_if_another_one_has_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = stores.tcp_store

    def late(*place: Any, **how: Any) -> dist.Store:
        store = serve(*place, **how)
        dist.PrefixStore("lockstep/nodes/job", store).add("count", 1)  # another launcher joins before this one counts
        return store

    monkeypatch.setattr(stores, "tcp_store", late)
    _, number = opened(Meeting(f"127.0.0.1:{free_port()}", "secret", "job", "127.0.0.1", 2, 2.0, host=True))
    assert number == 0
