"""Each check of `doctor`: fine, missing, and "cannot tell"."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster

from tests.jobs.helpers import lockstep
from tests.processes import ROOT

JOB: dict[str, Any] = {
    "name": "big", "recipe": "resnet18", "image": "localhost:5000/a:1", "nodes": 2, "gpus": 4,
    "volumes": [{"claim": "runs", "path": "/runs"}], "k8s": {"queue": "gpu", "image_pull_secrets": ["pull"]},
}  # fmt: skip
Doctor = Callable[..., dict[str, tuple[str, str]]]
pytestmark = pytest.mark.promise("k8s-states")


@pytest.fixture
def doctor(cluster: Cluster, tmp_path: Path) -> Doctor:
    """Name → result and detail of each check but those of lint, in a cluster that has all that the job needs."""
    put_operator(cluster, "ghcr.io/kubeflow/training-operator:v1.9.4", "--gang-scheduler-name=volcano")
    for number in range(2):
        status = {"allocatable": {"nvidia.com/gpu": "8"}}
        cluster.put("nodes", {"metadata": {"name": f"n{number}"}, "status": status}, "")
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, **claim})
    cluster.put("localqueues", {"metadata": {"name": "gpu"}, "spec": {"clusterQueue": "all"}})
    quota = {"flavors": [{"resources": [{"name": "nvidia.com/gpu", "nominalQuota": 8}]}]}
    cluster.put("clusterqueues", {"metadata": {"name": "all"}, "spec": {"resourceGroups": [quota]}}, "")
    cluster.put("secrets", {"metadata": {"name": "pull"}})

    def ask(**changes: Any) -> dict[str, tuple[str, str]]:
        own = {**JOB["k8s"], **changes.pop("k8s", {})}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **changes, "k8s": own}))
        done = lockstep(tmp_path, "doctor", "k8s", "job.yaml", "--json")
        rows = [row for row in json.loads(done.stdout) if row["name"] != "rules" and not row["name"].startswith("LS")]
        missing = any(row["result"] == "missing" for row in json.loads(done.stdout))
        assert done.returncode == missing, done
        return {row["name"]: (row["result"], row["detail"]) for row in rows}

    return ask


def put_operator(cluster: Cluster, image: str, *words: str) -> None:
    template = {"spec": {"containers": [{"name": "m", "image": image, "command": ["/manager", *words]}]}}
    spec, status = {"template": template}, {"readyReplicas": 1 if words else 0}
    cluster.put("deployments", {"metadata": {"name": image.split("/")[-1]}, "spec": spec, "status": status}, "")


def test_a_ready_cluster_is_ok_and_what_is_missing_is_named(doctor: Doctor, cluster: Cluster) -> None:
    found = doctor()
    assert {result for result, _ in found.values()} == {"ok"} and len(found) >= 11, found
    cluster.denied.add("create pods/exec")
    ((name, (result, detail)),) = [(name, row) for name, row in doctor().items() if row[0] != "ok"]
    assert (name, result) == ("exec", "note") and "deploy/k8s/components/debug" in detail, "no job needs it"
    cluster.unknown |= {"pytorchjobs", "podmonitors"}
    cluster.denied |= {"create pytorchjobs", "list configmaps"}
    cluster.remove("nodes", "n1", "")
    cluster.remove("secrets", "pull")
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    cluster.put("clusterqueues", {"metadata": {"name": "all"}, "spec": {}}, "")
    put_operator(cluster, "ghcr.io/kubeflow/training-operator:v1.9.4")
    found = doctor(k8s={"spread": "required"})
    wrong = {name for name, (result, _) in found.items() if result == "missing"}
    assert wrong == {"custom resource", "rights", "nodes", "pull secret", "volume", "quota", "operator"}, found
    assert found["pod monitor"][0] == found["gang scheduling"][0] == "warning"
    assert "configmaps" not in found["rights"][1], "a job with code needs them, and no other"
    cluster.incomplete = True
    assert doctor()["rights"][0] == "cannot tell", "an authorizer besides RBAC may grant them"
    cluster.remove("localqueues", "gpu")
    cluster.remove("persistentvolumeclaims", "runs")
    found = doctor(image="lockstep:cuda")
    assert found["queue"][0] == found["volume"][0] == "missing"
    assert found["image"][0] == "warning", "without a registry it is on one node at most, and there is one"
    cluster.put("nodes", {"metadata": {"name": "n2"}}, "")
    assert doctor(image="lockstep:cuda")["image"][0] == "missing"


def test_a_403_is_no_verdict_and_no_cluster_ends_the_checks(doctor: Doctor, cluster: Cluster, tmp_path: Path) -> None:
    cluster.denied |= {"nodes", "deployments", "secrets", "clusterqueues", "podmonitors"}
    found = doctor()
    assert {found[name][0] for name in ("nodes", "operator", "pull secrets", "pod monitor")} == {"cannot tell"}
    cluster.unknown.clear()
    cluster.denied.add("trainjobs")
    rows = json.loads(lockstep(tmp_path, "doctor", "k8s", "--json").stdout)
    assert [row["detail"] for row in rows if row["name"] == "custom resource"] == ["PyTorchJob kubeflow.org/v1"], rows
    cluster.tokens.clear()
    ((name, (result, detail)),) = doctor().items()
    assert (name, result) == ("cluster", "missing") and "log in again" in detail


def test_a_trainjobs_controller_and_runtime_are_looked_for(doctor: Doctor, cluster: Cluster) -> None:
    own = {"k8s": {"kind": "TrainJob", "runtime": "lockstep"}}
    found = doctor(**own)
    assert found["operator"][0] == "cannot tell" and "trainer-controller-manager" in found["operator"][1]
    assert found["runtime"][0] == "missing" and "deploy/k8s/overlays/trainer" in found["runtime"][1]
    put_operator(cluster, "ghcr.io/kubeflow/trainer/trainer-controller-manager:v2.1.0", "--ready")
    (runtime,) = yaml.safe_load_all((ROOT / "deploy/k8s/components/trainer/runtime.yaml").read_text())
    cluster.put("clustertrainingruntimes", runtime, "")
    cluster.denied.add("delete trainjobs")
    found = doctor(**own)
    assert found["operator"][0] == found["runtime"][0] == "ok" and "delete trainjobs" in found["rights"][1]
    plain = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": {}}}}}]}
    cluster.put("clustertrainingruntimes", {**runtime, "spec": {"template": {"spec": plain}}}, "")
    state, detail = doctor(**own)["runtime"]
    assert state == "warning" and all(word in detail for word in ("exit code 2", "a token", "finished jobs stay"))
