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


CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS001", {"name": "a" * 60}),
    ("LS002", {"image": None}),
    ("LS003", {"patch": {"spec": {"nprocPerNode": 4}}}),
    ("LS004", {"patch": {"spec": {"pytorchReplicaSpecs": {"worker": {"replicas": 1}}}}}),
    ("LS005", {"patch": {"spec": {"runPolicy": {"cleanPodPolicy": "Runing"}}}}),
    ("LS006", {"patch": {"spec": {"runPolicy": {"backoffLimit": None}}}}),
    ("LS007", {"patch": {"spec": {"runPolicy": {"ttlSecondsAfterFinished": None}}}}),
    ("LS008", {"patch": {"spec": {"runPolicy": {"activeDeadlineSeconds": None}}}}),
    ("LS009", {"patch": replica({"terminationGracePeriodSeconds": 30})}),
    ("LS010", {"patch": replica({"volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]})}),
    ("LS011", {"shm": "4Gi", "memory": "4Gi"}),
    ("LS012", {"env": {"WORLD_SIZE": "8"}}),
    ("LS013", {"container": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}),
    ("LS014", {"env": {"HF_TOKEN": "abc"}}),
    ("LS015", {"patch": replica({"securityContext": {"runAsNonRoot": False}})}),
    ("LS015", {"container": {"securityContext": {"privileged": True}}}),
    ("LS015", {"container": {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}}}),
    ("LS016", {"image": "localhost:5000/a:latest"}),
    ("LS017", {"container": {"readinessProbe": {"tcpSocket": {"port": 23456}}}}),
    ("LS018", {"patch": replica(restartPolicy="OnFailure")}),
    ("LS019", {"volumes": [{"claim": "data", "path": "/data"}]}),
    ("LS020", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}, {"claim": "data", "path": "/data"}]}),
    ("LS020", {"elastic": {"min_nodes": 1, "max_nodes": 2}, "volumes": [{"claim": "data", "path": "/data"}]}),
    ("LS021", {"elastic": {"min_nodes": 1, "max_nodes": 2}, "patch": {"spec": {"elasticPolicy": {"standalone": True}}}}),
    ("LS022", {"drop": "NetworkPolicy"}),
    ("LS023", {"patch": annotated({"prometheus.io/port": "9470"})}),
    ("LS024", {"container": {"ports": [{"name": "a-port-with-a-long-name", "containerPort": 1}]}}),
    ("LS025", {"container": {"resources": {"limits": {"cpu": "1", "memory": "8Gi"}}}}),
    ("LS026", {"k8s": {"topology": "required"}}),
    ("LS027", {"patch": {"spec": {"runPolicy": {"schedulingPolicy": {"minAvailable": 2}}}}}),
    ("LS028", {"patch": {"metadata": {"labels": None}}}),
    ("LS028", {"patch": {"metadata": {"name": "other"}}}),
    ("LS030", {"container": {"command": ["python", "train.py"]}}),
    ("LS031", {"patch": replica({"hostNetwork": True})}),
    ("LS031", {"patch": replica({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]})}),
    ("LS032", {"patch": annotated(None)}),
    ("LS033", {"container": {"resources": {"limits": {"nvidia.com/gpu": "4"}}}}),
    ("LS034", {"patch": replica({"volumes": []})}),
    ("LS034", {"container": {"volumeMounts": [{"name": {"of": "a template"}, "mountPath": "/x"}]}}),
    ("LS035", {"recipe_file": True}),
    ("LS036", {"elastic": {"min_nodes": 1, "max_nodes": 2}, "k8s": {"kind": "TrainJob"}}),
    ("LS037", {"k8s": {}}),
    ("LS038", {"shards": "/elsewhere"}),
    *(("LJ001", {"image": f"{host}/a@sha256:{'a' * 64}"}) for host in ("registry.example", "a.invalid:5000", "example.com")),
    *(("LJ002", {"image": f"localhost:5000/a:{tag}"}) for tag in ("cpu", "0123-cpu", "cpu@sha256:" + "a" * 64)),
    ("LJ003", {"ranks_per_node": 2}),
    ("LS040", {"gpus": 16}),
    ("LS041", {"k8s": {"rdma": {"vpc.amazonaws.com/efa": 4}, "hugepages": "5120Mi"}}),
    ("LS042", {"image": "lockstep:cuda"}),
    ("LJ004", {"cpus": 2, "memory": "64Gi"}),
    ("LS044", {"image": "lockstep:cuda", "nodes": 1}),
    ("LS045", {"k8s": {"kind": "TrainJob"}}),
]  # fmt: skip


def findings(change: dict[str, Any], folder: Path) -> set[str]:
    drop, part, patch = (change.get(key) for key in ("drop", "container", "patch"))
    values = {**GOOD, **change}
    if change.get("recipe_file"):
        (folder / "own.yaml").write_text("batch_size: 8\n")
        values["recipe"] = str(folder / "own.yaml")
    for key in ("drop", "container", "patch", "recipe_file"):
        values.pop(key, None)
    if part is not None:  # a patch replaces whole lists, so it repeats the container and changes it
        (_, job), _ = product.manifests("k8s", JobSpec.of(values))
        (whole,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        patch = replica({"containers": [{**whole, **part}]})
    if patch is not None:
        values["k8s"] = {**values["k8s"], "patch": patch}
    spec = JobSpec.of({key: value for key, value in values.items() if value is not None})
    objects = [item for item in product.manifests("k8s", spec)[0] if item["kind"] != drop]
    return set(product.findings("k8s", spec, objects))


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
