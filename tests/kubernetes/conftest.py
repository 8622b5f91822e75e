"""Fixtures: an emulated API server, and a backend that talks to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml
from k8s_cluster import Cluster
from k8s_operator import Operator, Running
from k8s_server import ApiServer

from tests import product
from tests.processes import ROOT


@pytest.fixture(scope="session", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """Caches Kubernetes' schemas: the package reads megabytes of JSON again for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
        yield running
        assert not running.cluster.not_emulated
        assert all(fault.hits for fault in running.cluster.faults), "a fault that nobody met proves nothing"


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return server.cluster


@pytest.fixture
def connect(server: ApiServer) -> Iterator[Callable[..., Any]]:
    """Makes backends; see `product.kubernetes`."""
    with contextlib.ExitStack() as stack:
        yield lambda **how: stack.enter_context(product.kubernetes(**how))


@pytest.fixture
def backend(connect: Callable[..., Any]) -> Any:
    return connect()


@pytest.fixture
def rights(cluster: Cluster) -> None:
    """Grants only the rights of deploy/k8s/base."""
    documents = yaml.safe_load_all((ROOT / "deploy/k8s/base/rbac.yaml").read_text())
    cluster.allow(next(item for item in documents if item["kind"] == "Role"))


@pytest.fixture
def operator(cluster: Cluster) -> Operator:
    """An operator whose pods run no process."""
    return Operator(cluster)


@pytest.fixture
def running(cluster: Cluster, tmp_path: Path) -> Iterator[Running]:
    """An operator whose pods are real launchers."""
    operator = Running(cluster, tmp_path)
    yield operator
    operator.stop()
