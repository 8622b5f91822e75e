"""Each check of `doctor`: fine, missing, and "cannot tell"."""

from __future__ import annotations

import pytest
from k8s_server import Cluster

from jobs.kubernetes.backend import KubernetesBackend
from jobs.kubernetes.checks import check
from jobs.spec.model import JobSpec

SPEC = JobSpec.of(
    {
        "name": "big", "recipe": "resnet18", "image": "a:1", "nodes": 2, "gpus": 4,
        "volumes": [{"claim": "runs", "path": "/runs"}], "k8s": {"queue": "gpu", "image_pull_secrets": ["pull"]},
    }
)  # fmt: skip


@pytest.fixture
def ready(cluster: Cluster) -> Cluster:
    image = "ghcr.io/kubeflow/training-operator:v1.9.4"
    words = ["/manager", "--gang-scheduler-name=volcano", "--pytorch-init-container-image=registry.example/alpine:3"]
    pod = {"spec": {"containers": [{"name": "m", "image": image, "command": words}]}}
    deployment = {"metadata": {"name": "operator"}, "spec": {"template": pod}, "status": {"readyReplicas": 1}}
    cluster.put("deployments", deployment, "")
    for number in range(2):
        cluster.put(
            "nodes", {"metadata": {"name": f"n{number}"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}, ""
        )
    claim = {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    cluster.put("persistentvolumeclaims", claim)
    cluster.put("localqueues", {"metadata": {"name": "gpu"}, "spec": {"clusterQueue": "all"}})
    quota = {"flavors": [{"resources": [{"name": "nvidia.com/gpu", "nominalQuota": 8}]}]}
    cluster.put("clusterqueues", {"metadata": {"name": "all"}, "spec": {"resourceGroups": [quota]}}, "")
    cluster.put("secrets", {"metadata": {"name": "pull"}})
    return cluster


def results(backend: KubernetesBackend) -> dict[str, str]:
    return {item.name: item.result for item in check(backend, SPEC, None)}


def test_a_ready_cluster_is_ok(backend: KubernetesBackend, ready: Cluster) -> None:
    found = check(backend, SPEC, None)
    assert {item.result for item in found} == {"ok"}, found
    assert len(found) == 13


def test_what_is_missing_is_named(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.unknown |= {"pytorchjobs", "podmonitors"}
    ready.denied.add("create pytorchjobs")
    ready.remove("nodes", "n1", "")
    ready.remove("secrets", "pull")
    ready.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    ready.put("clusterqueues", {"metadata": {"name": "all"}, "spec": {}}, "")
    ready.put(
        "deployments",
        {
            "metadata": {"name": "operator"},
            "spec": {"template": {"spec": {"containers": [{"image": "x/training-operator:1"}]}}},
        },
        "",
    )
    found = results(backend)
    for name in ("custom resource", "rights", "nodes", "pull secret", "volume", "quota", "operator"):
        assert found[name] == "missing", name
    for name in ("pod monitor", "gang scheduling", "init container"):
        assert found[name] == "warning", name
    ready.remove("localqueues", "gpu")
    ready.remove("persistentvolumeclaims", "runs")
    assert results(backend)["queue"] == results(backend)["volume"] == "missing"


def test_a_403_is_no_verdict(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.denied |= {"nodes", "deployments", "secrets", "clusterqueues", "podmonitors"}
    found = results(backend)
    assert [found[name] for name in ("nodes", "operator", "pull secrets", "pod monitor")] == ["cannot tell"] * 4


def test_no_cluster_ends_the_checks(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.tokens.clear()
    (only,) = check(backend, SPEC, None)
    assert only.result == "missing" and "log in again" in only.detail
