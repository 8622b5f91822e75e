"""A rank that comes before its store: it looks until something listens, and asks torch then."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from lockstep.training.parallel import stores
from tests.processes import free_port


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each store that torch was asked for: whether something listened by then."""
    found: list[bool] = []

    def store(host: str, port: int, *_: Any, **__: Any) -> None:
        found.append(_listens(port))

    monkeypatch.setattr(stores.dist, "TCPStore", store)
    return found


def test_torch_is_asked_when_the_store_listens(asked: list[bool]) -> None:
    port = free_port()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        late = threading.Timer(0.2, listener.listen)
        late.start()
        stores.tcp_store("127.0.0.1", port, serves=False, seconds=60, size=2)
        late.join()
    assert asked == [True]


def test_where_nothing_comes_torch_says_so(asked: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "LISTEN_SECONDS", 0.1)
    began = time.monotonic()
    stores.tcp_store("127.0.0.1", free_port(), serves=False, seconds=60, size=2)
    stores.tcp_store("no-such-host.invalid", free_port(), serves=False, seconds=60)
    assert asked[0] is False and len(asked) == 2 and time.monotonic() - began < 30, "a resolver may be slow"
