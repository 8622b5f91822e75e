"""Fixtures: an emulated API server, a backend that talks to it, and specs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate.utils
import pytest
import yaml
from k8s_cluster import Cluster
from k8s_operator import Operator
from k8s_server import ApiServer

from lockstep.jobs.kubernetes.api import Api, load_configuration
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from tests.processes import ROOT


@pytest.fixture(scope="session", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """Kubernetes' own are megabytes of JSON, which the package reads anew for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig(tmp_path / "kubeconfig")))
        yield running
        assert all(fault.hits for fault in running.cluster.faults), "a fault that nobody met proves nothing"


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return server.cluster


@pytest.fixture
def backend(server: ApiServer) -> Iterator[KubernetesBackend]:
    load, namespace = load_configuration(None)
    api = Api(load, timeout=5, sleep=lambda seconds: None)
    yield KubernetesBackend(api, namespace, interval=0.2, lost_after=1.0)
    api.close()


@pytest.fixture
def rights(cluster: Cluster) -> None:
    """Those of deploy/k8s/base, and no others."""
    documents = yaml.safe_load_all((ROOT / "deploy/k8s/base/rbac.yaml").read_text())
    cluster.allow(next(item for item in documents if item["kind"] == "Role"))


@pytest.fixture
def operator(cluster: Cluster) -> Operator:
    """Its pods only stand there."""
    return Operator(cluster)
