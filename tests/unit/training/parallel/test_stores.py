"""A rank that comes before its store: it looks until something listens, and asks torch then."""

from __future__ import annotations

import socket
import threading

import pytest

from lockstep.training.parallel import stores
from tests.processes import free_port


def test_torch_is_asked_when_the_store_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or where nothing comes, so that torch says so."""
    port, listens = free_port(), []
    monkeypatch.setattr(stores.dist, "TCPStore", lambda *_, **__: listens.append(late.finished.is_set()))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        late = threading.Timer(0.2, listener.listen)
        late.start()
        stores.tcp_store("127.0.0.1", port, serves=False, seconds=60, size=2)
        late.join()
    monkeypatch.setattr(stores, "LISTEN_SECONDS", 0.1)
    stores.tcp_store("127.0.0.1", free_port(), serves=False, seconds=60, size=2)
    stores.tcp_store("no-such-host.invalid", free_port(), serves=False, seconds=60)
    assert len(listens) == 3 and listens[0]
