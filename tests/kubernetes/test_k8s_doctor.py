"""Each check of `doctor`: ok, missing, and "cannot tell"."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster

from tests.jobs.helpers import lockstep

JOB: dict[str, Any] = {
    "name": "big", "recipe": "resnet18", "image": "localhost:5000/a:1", "nodes": 2, "gpus": 4,
    "volumes": [{"claim": "runs", "path": "/runs"}], "k8s": {"queue": "gpu"},
}  # fmt: skip
Doctor = Callable[..., dict[str, tuple[str, str]]]
pytestmark = pytest.mark.promise("k8s-states")


@pytest.fixture
def doctor(cluster: Cluster, tmp_path: Path) -> Doctor:
    """Returns name → (result, detail) of each check. The cluster has everything that the job needs."""
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, **claim})
    cluster.put("localqueues", {"metadata": {"name": "gpu"}, "spec": {"clusterQueue": "all"}})

    def ask(**changes: Any) -> dict[str, tuple[str, str]]:
        section = {**JOB["k8s"], **changes.pop("k8s", {})}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **changes, "k8s": section}))
        done = lockstep(tmp_path, "doctor", "k8s", "job.yaml", "--json")
        rows = json.loads(done.stdout)
        assert done.returncode == any(row["result"] == "missing" for row in rows), done
        return {row["name"]: (row["result"], row["detail"]) for row in rows}

    return ask


def test_a_ready_cluster_is_ok_and_what_is_missing_is_named(doctor: Doctor, cluster: Cluster) -> None:
    checks = doctor()
    assert {name for name, (result, _) in checks.items() if result != "ok"} == {"start"} and len(checks) >= 7, checks
    assert checks["start"][0] == "cannot tell", "the quota is not to be seen"
    cluster.denied.add("create pods/exec")
    assert doctor()["exec"][0] == "note" and "deploy/k8s/components/debug" in doctor()["exec"][1], "no job needs it"
    cluster.unknown.add("pytorchjobs")
    cluster.denied |= {"create pytorchjobs", "create configmaps"}
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteOnce"]}})
    checks = doctor()
    wrong = {name for name, (result, _) in checks.items() if result == "missing"}
    assert wrong == {"custom resource", "rights", "volume"}, checks
    assert "configmaps" not in checks["rights"][1], "a job with code needs them, and no other"
    cluster.incomplete = True
    assert doctor()["rights"][0] == "cannot tell", "an authorizer besides RBAC may grant them"
    cluster.remove("localqueues", "gpu")
    cluster.remove("persistentvolumeclaims", "runs")
    checks = doctor()
    assert checks["queue"][0] == checks["volume"][0] == "missing"


@pytest.mark.usefixtures("rights")
def test_the_rights_of_the_base_are_enough_to_ask(doctor: Doctor) -> None:
    checks = doctor()
    assert {name for name, (result, _) in checks.items() if result != "ok"} == {"start", "exec"}, checks


def test_a_403_is_no_verdict_and_no_cluster_ends_the_checks(doctor: Doctor, cluster: Cluster, tmp_path: Path) -> None:
    cluster.denied |= {"localqueues", "persistentvolumeclaims"}
    checks = doctor()
    assert {checks[name][0] for name in ("queue", "volumes")} == {"cannot tell"}
    cluster.unknown.clear()
    cluster.denied.add("trainjobs")
    rows = json.loads(lockstep(tmp_path, "doctor", "k8s", "--json").stdout)
    assert [row["detail"] for row in rows if row["name"] == "custom resource"] == ["PyTorchJob kubeflow.org/v1"], rows
    cluster.tokens.clear()
    ((name, (result, detail)),) = doctor().items()
    assert (name, result) == ("cluster", "missing") and "log in again" in detail


def test_the_rights_of_a_trainjob_are_its_own(doctor: Doctor, cluster: Cluster) -> None:
    cluster.denied.add("delete trainjobs")
    assert "delete trainjobs" in doctor(k8s={"kind": "TrainJob", "runtime": "lockstep"})["rights"][1]
