"""Every lint rule is provoked once, and a job without a fault provokes none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.jobs.checks.rule import errors
from lockstep.jobs.kubernetes.render import kubernetes as render
from lockstep.jobs.kubernetes.rules import RULES
from lockstep.jobs.spec.model import JobSpec

GOOD: dict[str, Any] = {
    "name": "good", "recipe": "resnet18", "image": "registry.example/a@sha256:" + "b" * 64, "nodes": 2, "gpus": 4,
    "shards": "/data/cifar10",
    "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
    "k8s": {"socket_interface": "eth0", "master": True},
}  # fmt: skip


def replica(pod: dict[str, Any] | None = None, key: str = "Master", **fields: Any) -> dict[str, Any]:
    item: dict[str, Any] = {**fields}
    if pod is not None:
        item["template"] = {"spec": pod}
    return {"spec": {"pytorchReplicaSpecs": {key: item}}}


def annotated(annotations: dict[str, str] | None) -> dict[str, Any]:
    return replica(template={"metadata": {"annotations": annotations}})


CASES: list[tuple[str, dict[str, Any]]] = [
    ("LS001", {"name": "a" * 60}),
    ("LS002", {"image": None}),
    ("LS002", {"container": {"name": "trainer"}}),
    ("LS003", {"patch": {"spec": {"nprocPerNode": "auto"}}}),
    ("LS003", {"patch": {"spec": {"nprocPerNode": 4}}}),
    ("LS004", {"patch": {"spec": {"pytorchReplicaSpecs": {"worker": {"replicas": 1}}}}}),
    ("LS004", {"patch": replica(replicas=2)}),
    ("LS005", {"patch": {"spec": {"runPolicy": {"cleanPodPolicy": "Runing"}}}}),
    ("LS006", {"patch": {"spec": {"runPolicy": {"backoffLimit": None}}}}),
    ("LS006", {"patch": {"spec": {"runPolicy": {"backoffLimit": 3}}}}),
    ("LS007", {"patch": {"spec": {"runPolicy": {"ttlSecondsAfterFinished": None}}}}),
    ("LS008", {"patch": {"spec": {"runPolicy": {"activeDeadlineSeconds": None}}}}),
    ("LS009", {"patch": replica({"terminationGracePeriodSeconds": 30})}),
    ("LS010", {"patch": replica({"volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]})}),
    ("LS010", {"container": {"volumeMounts": []}}),
    ("LS011", {"shm": "4Gi", "memory": "4Gi"}),
    ("LS012", {"env": {"WORLD_SIZE": "8"}}),
    ("LS012", {"env": {"PET_NNODES": "2"}}),
    ("LS013", {"container": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}),
    ("LS014", {"env": {"HF_TOKEN": "abc"}}),
    ("LS015", {"patch": replica({"securityContext": {"runAsNonRoot": False}})}),
    ("LS015", {"container": {"securityContext": {"privileged": True}}}),
    ("LS015", {"container": {"securityContext": {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}}}),
    ("LS016", {"image": "registry.example/a:latest"}),
    ("LS017", {"container": {"readinessProbe": {"tcpSocket": {"port": 23456}}}}),
    ("LS018", {"patch": replica(restartPolicy="OnFailure")}),
    ("LS018", {"patch": replica({"restartPolicy": "Never"})}),
    ("LS019", {"volumes": [{"claim": "data", "path": "/data"}]}),
    ("LS020", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}, {"claim": "data", "path": "/data"}]}),
    ("LS020", {"run_dir": "runs/x"}),
    ("LS020", {"elastic": {"min_nodes": 1, "max_nodes": 2}, "volumes": [{"claim": "data", "path": "/data"}]}),
    ("LS021", {"patch": {"spec": {"elasticPolicy": {"minReplicas": 1}}}}),
    ("LS021", {"elastic": {"min_nodes": 1, "max_nodes": 2}, "patch": {"spec": {"elasticPolicy": {"standalone": True}}}}),
    ("LS022", {"drop": "NetworkPolicy"}),
    ("LS023", {"patch": annotated({"prometheus.io/port": "9470"})}),
    ("LS024", {"container": {"ports": [{"name": "a-port-with-a-long-name", "containerPort": 1}]}}),
    ("LS024", {"metrics_port": 23455}),
    ("LS025", {"container": {"resources": {"limits": {"cpu": "1", "memory": "8Gi"}}}}),
    ("LS025", {"k8s": {"rdma": {"vpc.amazonaws.com/efa": 4}}}),
    ("LS026", {"k8s": {"topology": "required"}}),
    ("LS027", {"patch": {"spec": {"runPolicy": {"schedulingPolicy": {"minAvailable": 2}}}}}),
    ("LS028", {"patch": {"metadata": {"labels": None}}}),
    ("LS028", {"patch": {"kind": "Job"}}),
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
    ("LS036", {"k8s": {"kind": "TrainJob", "priority_class": "high"}}),
    ("LS036", {"k8s": {"kind": "TrainJob", "ttl": "1d"}}),
    ("LS037", {"k8s": {}}),
    ("LS038", {"shards": "/elsewhere"}),
    ("LS039", {"ranks_per_node": 2}),
    ("LS040", {"gpus": 16}),
    ("LS041", {"k8s": {"rdma": {"vpc.amazonaws.com/efa": 4}, "hugepages": "5120Mi"}}),
    ("LS042", {"image": "lockstep:cuda"}),
    ("LS043", {"cpus": 2, "memory": "64Gi"}),
    ("LS043", {"cpus": 16, "memory": "8Gi"}),
    ("LS044", {"image": "lockstep:cuda", "nodes": 1}),
    ("LS045", {"k8s": {"kind": "TrainJob"}}),
]  # fmt: skip


def findings(change: dict[str, Any], tmp_path: Any) -> set[str]:
    change = dict(change)
    drop, part, patch = change.pop("drop", None), change.pop("container", None), change.pop("patch", None)
    if change.pop("recipe_file", None):
        (tmp_path / "own.yaml").write_text("batch_size: 8\n")
        change["recipe"] = str(tmp_path / "own.yaml")
    values = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    if part is not None:  # a patch replaces whole lists, so it repeats the container and changes it
        whole = render(JobSpec.of(values))[1]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
            "containers"
        ][0]
        patch = replica({"containers": [{**whole, **part}]})
    if patch is not None:
        values["k8s"] = {**values["k8s"], "patch": patch}
    spec = JobSpec.of(values)
    return {item.id for item in RULES.apply(spec, [item for item in render(spec) if item["kind"] != drop])}


def test_a_good_job_has_no_finding(tmp_path: Any) -> None:
    assert findings({}, tmp_path) == set()


@pytest.mark.parametrize(("rule", "change"), CASES)
def test_the_rule_finds_its_footgun(rule: str, change: dict[str, Any], tmp_path: Any) -> None:
    assert rule in findings(change, tmp_path)


def test_an_image_that_is_on_every_node_already_needs_no_registry(tmp_path: Any) -> None:
    loaded = {"image": "lockstep:cuda", "k8s": {**GOOD["k8s"], "image_pull_policy": "Never"}}
    assert findings(loaded, tmp_path) == {"LS016"}, "a tag can move"
    program = {"image": "python:3.11@sha256:" + "b" * 64, "recipe": None, "shards": None, "command": ["python", "x.py"]}
    assert findings(program, tmp_path) == set(), "Docker Hub's own images are fine for a program"


def test_rdma_needs_no_capability(tmp_path: Any) -> None:
    """PodSecurity `baseline` refuses IPC_LOCK, and an ordinary user does not get it."""
    assert findings({"k8s": {**GOOD["k8s"], "rdma": {"rdma/hca_shared": 1}}}, tmp_path) == set()


def test_every_rule_is_provoked() -> None:
    ours = {rule.id for rule in RULES.all()}
    assert ours == {rule for rule, _ in CASES}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


GOOD_SPEC = JobSpec.of(GOOD)
GOOD_OBJECTS = render(GOOD_SPEC)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_patch_makes_lint_stumble(data: st.DataObject) -> None:
    """Any part of the manifest replaced by anything: findings, never a traceback."""
    spec, objects = GOOD_SPEC, copy.deepcopy(GOOD_OBJECTS)
    place: Any = objects[1]
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans() | st.just(True)):
            place = place[key]
            continue
        place[key] = data.draw(values)
        break
    assert all("\n" not in item.message for item in RULES.apply(spec, objects))
    errors(RULES.apply(spec, objects))
