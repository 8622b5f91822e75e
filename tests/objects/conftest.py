"""One server for the whole suite, and a proxy that each test disturbs for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.objects.server import Proxy, moto


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of moto's server."""
    with moto(tmp_path_factory.mktemp("moto")) as port:
        yield port


@pytest.fixture(scope="session")
def shared_proxy(server: int) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def proxy(shared_proxy: Proxy) -> Iterator[Proxy]:
    """Nothing happens to a request before the test says so."""
    shared_proxy.reset()
    yield shared_proxy
    shared_proxy.reset()
