"""Every lint rule is provoked once, and a job without a fault provokes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.product import JobSpec

GOOD: dict[str, Any] = {
    "name": "good", "recipe": "resnet18", "image": "localhost:5000/a@sha256:" + "b" * 64, "nodes": 2, "gpus": 4,
    "shards": "/data/cifar10", "k8s": {},
    "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
}  # fmt: skip
pytestmark = pytest.mark.promise("k8s-render")


def worker(**template: Any) -> dict[str, Any]:
    return {"spec": {"pytorchReplicaSpecs": {"Worker": {"template": template}}}}


def container(**fields: Any) -> dict[str, Any]:
    return worker(spec={"containers": [{"name": "pytorch", **fields}]})


CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS001", {"name": "a" * 60}),
    ("LJ005", {"image": None}),
    ("LJ010", {"env": {"WORLD_SIZE": "8"}}),
    ("LJ006", {"env": {"HF_TOKEN": "abc"}}),
    ("LS019", {"volumes": [{"claim": "data", "path": "/data"}]}),
    ("LJ007", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}, {"claim": "data", "path": "/data"}]}),
    ("LS036", {"k8s": {"kind": "TrainJob", "ttl": "1d"}}),
    ("LJ008", {"shards": "/elsewhere"}),
    ("LJ009", {"live": True, "nodes": 1}),
    ("LS042", {"image": "lockstep:cuda"}),
    ("LJ011", {"patch": {"kind": "Job"}}),
    ("LJ011", {"patch": {"metadata": {"labels": None}}}),
    ("LJ011", {"patch": {"metadata": {"name": "other"}}}),
    ("LJ011", {"patch": {"spec": {"runPolicy": None}}}),
    ("LJ011", {"patch": worker(metadata={"labels": {"lockstep/job": "other"}})}),
    ("LJ011", {"patch": worker(spec={"containers": None})}),
    ("LJ011", {"patch": worker(spec=None)}),
    ("LJ011", {"patch": {"spec": {"pytorchReplicaSpecs": None}}}),
    ("LJ011", {"k8s": {"kind": "TrainJob", "patch": {"spec": {"runtimePatches": None}}}}),
    ("LJ012", {"patch": worker(spec={"hostNetwork": True})}),
]  # fmt: skip
AT = "spec.pytorchReplicaSpecs.Worker.template.spec"
ONE_FIELD: list[tuple[dict[str, Any], str]] = [
    (container(resources={"limits": {"ephemeral-storage": "100Gi"}}), '.containers[pytorch].resources.limits.ephemeral-storage: "100Gi"'),
    (container(resources={"claims": [{"name": "gpu"}]}), '.containers[pytorch].resources.claims[gpu].name: "gpu"'),
    (container(resources={"requests": {"cpu": "1"}}), '.containers[pytorch].resources.requests.cpu: "1"'),
    (container(envFrom=[{"secretRef": {"name": "w"}}]), '.containers[pytorch].envFrom[0].secretRef.name: "w"'),
    (container(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]), '.containers[pytorch].env[NCCL_DEBUG].value: "INFO"'),
    (container(lifecycle={"preStop": {"sleep": {"seconds": 5}}}), ".containers[pytorch].lifecycle.preStop.sleep.seconds: 5"),
    (container(workingDir="/workspace"), '.containers[pytorch].workingDir: "/workspace"'),
    (container(volumeMounts=[{"mountPath": "/runs", "subPath": "x"}]), '.containers[pytorch].volumeMounts[/runs].subPath: "x"'),
    (worker(spec={"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]}), '.volumes[tmp].emptyDir.sizeLimit: "1Gi"'),
    (worker(spec={"hostNetwork": True}), ".hostNetwork: true"),
]  # fmt: skip


@pytest.mark.parametrize(("patch", "setting"), ONE_FIELD, ids=[setting for _, setting in ONE_FIELD])
def test_a_patch_of_one_field_changes_one_field_and_is_shown(
    patch: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    """This holds for other settings of the job, too."""
    for more in ({}, {"image": "localhost:5000/b:2", "env": {"A": "1"}, "max_restarts": 5}):
        notes = product.findings("k8s", JobSpec.of({**GOOD, **more, "k8s": {**GOOD["k8s"], "patch": patch}}))
        assert [(id, item.message) for id, item in notes.items()] == [("LJ012", f"k8s.patch sets {AT}{setting}")]


def test_a_patch_that_would_not_merge_is_refused() -> None:
    patch = worker(spec={"containers": [{"name": {}}]})
    with pytest.raises(product.UserError, match="the name of a list's item must be a text or a number, got {}"):
        product.manifests("k8s", JobSpec.of({**GOOD, "k8s": {**GOOD["k8s"], "patch": patch}}))


def test_a_patch_of_a_trainjob_merges_alike() -> None:
    replicated_job = {
        "name": "node",
        "template": {"spec": {"template": {"spec": {"containers": [{"name": "node", "workingDir": "/x"}]}}}},
    }
    runtime = {"template": {"spec": {"replicatedJobs": [replicated_job]}}}
    section = {"kind": "TrainJob", "runtime": "lockstep"}
    (_, plain), _ = product.manifests("k8s", JobSpec.of({**GOOD, "k8s": section}))
    manager = plain["spec"]["runtimePatches"][0]["manager"]
    patch = {"spec": {"runtimePatches": [{"manager": manager, "trainingRuntimeSpec": runtime}]}}
    spec = JobSpec.of({**GOOD, "k8s": {**section, "patch": patch}})
    (_, job), _ = product.manifests("k8s", spec)
    merged_job = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
    (node,) = merged_job["template"]["spec"]["template"]["spec"]["containers"]
    assert node["workingDir"] == "/x" and node["volumeMounts"] and list(product.findings("k8s", spec)) == ["LJ012"]


def findings(change: dict[str, Any]) -> set[str]:
    patch = change.get("patch")
    values = {**GOOD, **change}
    values.pop("patch", None)
    if patch is not None:
        values["k8s"] = {**values["k8s"], "patch": patch}
    return set(product.findings("k8s", JobSpec.of({key: value for key, value in values.items() if value is not None})))


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_the_rule_finds_its_footgun(rule: str, change: dict[str, Any]) -> None:
    assert rule in findings(change)


def test_every_rule_is_provoked_and_good_jobs_provoke_none() -> None:
    assert product.rules("k8s") == {rule for rule, _ in CASES}
    assert findings({}) == set()
    loaded = {"image": "lockstep:cuda", "k8s": {**GOOD["k8s"], "image_pull_policy": "Never"}}
    assert findings(loaded) == set(), "on every node already, it needs no registry"
    program = {"image": "python:3.11@sha256:" + "b" * 64, "recipe": None, "shards": None, "command": ["python", "x.py"]}
    assert findings(program) == set(), "Docker Hub's own images are fine for a program"
