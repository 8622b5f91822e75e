"""Every lint rule is provoked once, and a job without a fault provokes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.product import JobSpec

GOOD: dict[str, Any] = {
    "name": "good", "recipe": "resnet18", "image": "localhost:5000/a@sha256:" + "b" * 64, "nodes": 2, "gpus": 4,
    "shards": "/data/cifar10", "k8s": {"socket_interface": "eth0"},
    "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
}  # fmt: skip
pytestmark = pytest.mark.promise("k8s-render")


def replica(pod: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    more = {"template": {"spec": pod}} if pod is not None else {}
    return {"spec": {"pytorchReplicaSpecs": {"Worker": {**fields, **more}}}}


def annotated(annotations: dict[str, str] | None) -> dict[str, Any]:
    return replica(template={"metadata": {"annotations": annotations}})


CLOSED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
OWN = {"name": "own", "image": "a", "securityContext": CLOSED}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS001", {"name": "a" * 60}),
    ("LJ005", {"image": None}),
    ("LS011", {"shm": "4Gi", "memory": "4Gi"}),
    ("LS012", {"env": {"WORLD_SIZE": "8"}}),
    ("LJ006", {"env": {"HF_TOKEN": "abc"}}),
    ("LS016", {"image": "localhost:5000/a:latest"}),
    ("LS019", {"volumes": [{"claim": "data", "path": "/data"}]}),
    ("LJ007", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}, {"claim": "data", "path": "/data"}]}),
    ("LS024", {"metrics_port": 23454}),
    ("LS025", {"k8s": {"rdma": {"vpc.amazonaws.com/efa": 4}}}),
    ("LS026", {"k8s": {"topology": "required"}}),
    ("LS035", {"recipe_file": True}),
    ("LS036", {"k8s": {"kind": "TrainJob", "ttl": "1d"}}),
    ("LS037", {"k8s": {}}),
    ("LJ008", {"shards": "/elsewhere"}),
    ("LJ009", {"live": True, "nodes": 1}),
    ("LJ010", {"recipe": None, "shards": None, "command": ["python", "other.py"], "code_folder": True}),
    *(("LJ001", {"image": f"{host}/a@sha256:{'a' * 64}"}) for host in ("registry.example", "a.invalid:5000", "example.com")),
    *(("LJ002", {"image": f"localhost:5000/a:{tag}"}) for tag in ("cpu", "0123-cpu", "cpu@sha256:" + "a" * 64)),
    ("LJ003", {"ranks_per_node": 2}),
    ("LS040", {"gpus": 16}),
    ("LS041", {"k8s": {"rdma": {"vpc.amazonaws.com/efa": 4}, "hugepages": "5120Mi"}}),
    ("LS042", {"image": "lockstep:cuda"}),
    ("LJ004", {"cpus": 2, "memory": "64Gi"}),
    ("LS044", {"image": "lockstep:cuda", "nodes": 1}),
    ("LS045", {"k8s": {"kind": "TrainJob"}}),
    # What a patch changes of what is rendered, or adds to it where it opens a door.
    ("LS028", {"patch": {"kind": "Job"}}),
    ("LS028", {"patch": {"metadata": {"labels": None}}}),
    ("LS028", {"patch": {"metadata": {"name": "other"}}}),
    ("LS028", {"patch": {"spec": {"nprocPerNode": 4}}}),
    ("LS028", {"patch": {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}}}}}),
    ("LS028", {"patch": {"spec": {"runPolicy": {"cleanPodPolicy": "None"}}}}),
    ("LS028", {"patch": {"spec": {"runPolicy": {"backoffLimit": None}}}}),
    ("LS028", {"patch": replica({"terminationGracePeriodSeconds": 30})}),
    ("LS028", {"patch": replica({"volumes": []})}),
    ("LS028", {"patch": replica({"restartPolicy": "Always"})}),
    ("LS028", {"patch": replica({"hostNetwork": True})}),
    ("LS028", {"patch": replica({"securityContext": {"runAsNonRoot": False}})}),
    ("LS028", {"patch": replica({"initContainers": [{"name": "own", "image": "a"}]})}),
    ("LS028", {"patch": replica(restartPolicy="OnFailure")}),
    ("LS028", {"patch": annotated({"prometheus.io/port": "9470"})}),
    ("LS028", {"volume": {"name": "x", "hostPath": {"path": "/"}}}),
    ("LS028", {"volume": {"name": "x", "nfs": {"server": "files.example.com", "path": "/"}}}),
    ("LS028", {"volume": {"name": "x", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}}),
    ("LS028", {"container": {"securityContext": {"privileged": True}}}),
    ("LS028", {"container": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}}),
    ("LS028", {"patch": replica({"initContainers": [{**OWN, "ports": [{"hostPort": 1}]}]})}),
    ("LS028", {"container": {"readinessProbe": {"tcpSocket": {"port": 23456}}}}),
    ("LS028", {"container": {"command": ["python", "train.py"]}}),
    ("LS028", {"container": {"resources": {"limits": {"nvidia.com/gpu": "4"}}}}),
]  # fmt: skip
ADDED: list[dict[str, Any]] = [
    {"patch": {"spec": {"runPolicy": {"suspend": True, "schedulingPolicy": {"minAvailable": 2}}}}},
    {"patch": {"metadata": {"annotations": {"example.com/team": "vision"}}}},
    {"patch": replica({"runtimeClassName": "kata", "affinity": {"nodeAffinity": {}}})},
    {"patch": replica({"initContainers": [OWN]})},
    {"patch": annotated({"example.com/do-not-disturb": "true"})},
    {"volume": {"name": "x", "configMap": {"name": "settings"}}},
    {"container": {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}}},
]


@pytest.mark.parametrize("change", ADDED)
def test_a_patch_adds_what_has_no_setting(change: dict[str, Any], tmp_path: Path) -> None:
    assert findings(change, tmp_path) == set()


@pytest.mark.parametrize("patch", [{"hostNetwork": True}, {"nodeSelector": {"a": "b"}, "volumes": None}], ids=str)
def test_a_patch_of_a_trainjob_is_guarded_alike(patch: dict[str, Any]) -> None:
    spec = JobSpec.of({**GOOD, "k8s": {"kind": "TrainJob", "runtime": "lockstep"}})
    (_, job), _ = product.manifests("k8s", spec)
    (own,) = job["spec"]["runtimePatches"]
    template = own["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"] = {key: value for key, value in {**template["spec"], **patch}.items() if value is not None}
    other = JobSpec.of({**GOOD, "k8s": {**spec.plain()["k8s"], "patch": {"spec": job["spec"]}}})
    assert "LS028" in product.findings("k8s", other)
    more = {"manager": "example.com/mine", "trainingRuntimeSpec": {}}
    other = JobSpec.of({**GOOD, "k8s": {**spec.plain()["k8s"], "patch": {"spec": {"runtimePatches": [own, more]}}}})
    assert "LS028" in product.findings("k8s", other)


def findings(change: dict[str, Any], folder: Path) -> set[str]:
    part, volume, patch = (change.get(key) for key in ("container", "volume", "patch"))
    values = {**GOOD, **change}
    if change.get("recipe_file"):
        (folder / "own.yaml").write_text("batch_size: 8\n")
        values["recipe"] = str(folder / "own.yaml")
    if change.get("code_folder"):
        (folder / "train.py").write_text("")
        values["code"] = str(folder)
    for key in ("volume", "container", "patch", "recipe_file", "code_folder"):
        values.pop(key, None)
    if part is not None or volume is not None:  # a patch replaces whole lists, so it repeats what is there
        (_, job), _ = product.manifests("k8s", JobSpec.of(values))
        own = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        (whole,) = own["containers"]
        for key, value in (part or {}).items():
            merged = isinstance(value, dict) and key == "securityContext"
            whole[key] = {**whole[key], **value} if merged else value
        patch = replica({"containers": [whole], "volumes": [*own["volumes"], *([volume] if volume else [])]})
    if patch is not None:
        values["k8s"] = {**values["k8s"], "patch": patch}
    return set(product.findings("k8s", JobSpec.of({key: value for key, value in values.items() if value is not None})))


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_the_rule_finds_its_footgun(rule: str, change: dict[str, Any], tmp_path: Path) -> None:
    assert rule in findings(change, tmp_path)


def test_every_rule_is_provoked_and_good_jobs_provoke_none(tmp_path: Path) -> None:
    assert product.rules("k8s") == {rule for rule, _ in CASES}
    assert findings({}, tmp_path) == set()
    loaded = {"image": "lockstep:cuda", "k8s": {**GOOD["k8s"], "image_pull_policy": "Never"}}
    assert findings(loaded, tmp_path) == {"LS016"}, "on every node already, it needs no registry; its tag can move"
    program = {"image": "python:3.11@sha256:" + "b" * 64, "recipe": None, "shards": None, "command": ["python", "x.py"]}
    assert findings(program, tmp_path) == set(), "Docker Hub's own images are fine for a program"
    rdma = {"k8s": {**GOOD["k8s"], "rdma": {"rdma/hca_shared": 1}}}
    assert findings(rdma, tmp_path) == set(), "IPC_LOCK is refused by `baseline`, and an ordinary user does not get it"
