"""One server for the whole suite, and a proxy whose faults each test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.events import weights_digest
from tests.objects.server import Proxy, moto
from tests.processes import ROOT
from tests.warm.gang import running


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
    """Yields a proxy without faults."""
    shared_proxy.reset()
    yield shared_proxy
    shared_proxy.reset()


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the weights at the end of a run of `job.py` without a bucket."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    with running(
        [[str(ROOT / "tests/objects/job.py"), str(run_dir), "s3://bucket/none", "checkpoint.to=null"]]
    ) as gang:
        done = gang.wait(240)
    assert done.code == 0, done.output
    return weights_digest(run_dir)
