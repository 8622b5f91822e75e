"""Each check of `doctor`: fine, missing, and "cannot tell"."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from k8s_cluster import Cluster
from k8s_nodes import Nodes

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.kubernetes.checks import check
from lockstep.jobs.spec.model import JobSpec

ROOT = Path(__file__).parents[2]

SPEC = JobSpec.of(
    {
        "name": "big", "recipe": "resnet18", "image": "registry.example/a:1", "nodes": 2, "gpus": 4,
        "volumes": [{"claim": "runs", "path": "/runs"}], "k8s": {"master": True, "queue": "gpu", "image_pull_secrets": ["pull"]},
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


def test_a_right_that_no_job_needs_is_a_note(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.denied.add("create pods/exec")
    (found,) = [item for item in check(backend, SPEC, None) if item.result != "ok"]
    assert (found.name, found.result) == ("exec", "note")
    assert found.detail.startswith("may not create pods/exec: ") and "deploy/k8s/components/debug" in found.detail


def test_a_403_is_no_verdict(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.denied |= {"nodes", "deployments", "secrets", "clusterqueues", "podmonitors"}
    found = results(backend)
    assert [found[name] for name in ("nodes", "operator", "pull secrets", "pod monitor")] == ["cannot tell"] * 4


def test_a_trainjobs_controller_and_runtime_are_looked_for(backend: KubernetesBackend, ready: Cluster) -> None:
    spec = JobSpec.of(
        {**SPEC.plain(), "k8s": {**SPEC.plain()["k8s"], "kind": "TrainJob", "runtime": "lockstep", "master": False}}
    )

    def found() -> dict[str, tuple[str, str]]:
        return {item.name: (item.result, item.detail) for item in check(backend, spec, None)}

    assert found()["operator"] == ("cannot tell", "no deployment of an image named trainer-controller-manager")
    assert found()["runtime"][0] == "missing" and "deploy/k8s/overlays/trainer" in found()["runtime"][1]
    pod = {
        "spec": {"containers": [{"name": "m", "image": "ghcr.io/kubeflow/trainer/trainer-controller-manager:v2.1.0"}]}
    }
    ready.put("deployments", {"metadata": {"name": "t"}, "spec": {"template": pod}, "status": {"readyReplicas": 1}}, "")
    (runtime,) = yaml.safe_load_all((ROOT / "deploy/k8s/components/trainer/runtime.yaml").read_text())
    ready.put("clustertrainingruntimes", runtime, "")
    assert found()["operator"][0] == "ok" and found()["runtime"] == ("ok", "lockstep")
    assert "init container" not in found(), "that is the training-operator's"
    ready.denied.add("delete trainjobs")
    assert "delete trainjobs" in found()["rights"][1]
    plain = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": {}}}}}]}
    ready.put("clustertrainingruntimes", {**runtime, "spec": {"template": {"spec": plain}}}, "")
    state, detail = found()["runtime"]
    assert state == "warning" and all(word in detail for word in ("exit code 2", "a token", "finished jobs stay"))


def test_a_node_that_does_not_answer_is_no_place_for_a_job(backend: KubernetesBackend, ready: Cluster) -> None:
    """It keeps what it could give away."""
    nodes = Nodes(ready, "n0", "n1")
    nodes.die("n0")
    nodes.clock.sleep(nodes.grace)
    spec = JobSpec.of({**SPEC.plain(), "k8s": {**SPEC.plain()["k8s"], "spread": "required"}})
    (found,) = [item for item in check(backend, spec, None) if item.name == "nodes"]
    assert (
        found.result == "missing"
        and found.detail.startswith("1 of 1 nodes have 4 ")
        and found.detail.endswith("not ready: 1 more")
    )
    nodes.come_back("n0")
    nodes.clock.sleep(5)
    assert [item.result for item in check(backend, spec, None) if item.name == "nodes"] == ["ok"]


def test_an_image_without_a_registry_is_on_one_node_at_most(backend: KubernetesBackend, ready: Cluster) -> None:
    spec = JobSpec.of({**SPEC.plain(), "image": "lockstep:cuda"})
    assert [item.result for item in check(backend, spec, None) if item.name == "image"] == ["missing"]
    ready.remove("nodes", "n1", "")
    assert [item.result for item in check(backend, spec, None) if item.name == "image"] == ["warning"]


def test_no_cluster_ends_the_checks(backend: KubernetesBackend, ready: Cluster) -> None:
    ready.tokens.clear()
    (only,) = check(backend, SPEC, None)
    assert only.result == "missing" and "log in again" in only.detail
