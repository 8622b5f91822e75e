"""Manifests: golden files, purity, strict CRD schemas, Kubernetes' schemas, and 250 specs from hypothesis."""

from __future__ import annotations

import copy
import cProfile
import json
import os
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from k8s_admission import violations
from k8s_schema import crd, validator

from tests import product
from tests.processes import ROOT
from tests.product import JobSpec, UserError

GOLDEN = Path(__file__).parent / "golden"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
pytestmark = pytest.mark.promise("k8s-render")

GPU: dict[str, Any] = {
    "name": "big", "recipe": "bag_of_tricks", "image": "localhost:5000/lockstep@sha256:" + "a" * 64, "nodes": 2, "gpus": 4,
    "cpus": 16, "memory": "64Gi", "shm": "16Gi", "time_limit": "2h", "shards": "/data",
    "secrets": {"WANDB_API_KEY": {"secret": "wandb", "key": "key"}}, "env": {"EXPERIMENT": "1e3", "NCCL_SOCKET_IFNAME": "eth0"},
    "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
    "k8s": {"namespace": "team", "priority_class": "high", "image_pull_secrets": ["pull"]},
}  # fmt: skip
CODE = {"hash": "c0de" * 16, "packed": 2_000_000}
SPECS: dict[str, dict[str, Any]] = {
    "gpu": {
        **GPU, "code": CODE,
        "k8s": {**GPU["k8s"], "queue": "gpu-queue", "rdma": {"vpc.amazonaws.com/efa": 4}, "hugepages": "5120Mi"},
    },
    "cpu": {"name": "small", "recipe": "smoke", "image": "localhost:5000/lockstep:1", "ranks_per_node": 2, "run_dir": "/tmp/run"},
    "trainjob": {
        **GPU, "name": "second", "code": CODE,
        "k8s": {"namespace": "team", "image_pull_secrets": ["pull"], "kind": "TrainJob", "runtime": "lockstep"},
    },
}  # fmt: skip


def replicas(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"].get("pytorchReplicaSpecs", {})


def validate(objects: list[dict[str, Any]]) -> None:
    """Validates objects against the CRD, against Kubernetes' schemas, and for rules that schemas lack."""
    policy, job = objects
    kubernetes_validate.validate(policy, "1.32", strict=True)
    assert job["apiVersion"] == crd(job["kind"])["apiVersion"]
    complaints = [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in validator(job["kind"]).iter_errors(job)]
    assert not complaints, complaints[:3]
    for key, replica in replicas(job).items():
        template = replica["template"]
        meta = {"name": "x", **template["metadata"]}
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}, "1.32", strict=True
        )
        assert len(f"{job['metadata']['name']}-{key.lower()}-{replica['replicas'] - 1}") <= 63
        (container,) = template["spec"]["containers"]
        assert container["name"] == "pytorch" and container["image"]
        mounts, volumes = container["volumeMounts"], [item["name"] for item in template["spec"]["volumes"]]
        for unique in ([item["name"] for item in container["env"]], [mount["mountPath"] for mount in mounts], volumes):
            assert len(unique) == len(set(unique)), unique
        assert {mount["name"] for mount in mounts} <= set(volumes)
        assert all(len(port["name"]) <= 15 for port in container["ports"])
        assert all(value != "" for value in container["resources"]["limits"].values())


@pytest.mark.parametrize("name", SPECS)
def test_golden(name: str) -> None:
    """`GOLDEN=write pytest` rewrites the files: read the diff before you commit it."""
    spec = JobSpec.of(SPECS[name])
    objects, text = product.manifests("k8s", spec)
    if os.environ.get("GOLDEN") == "write":
        (GOLDEN / f"{name}.yaml").write_text(text)
    assert text == (GOLDEN / f"{name}.yaml").read_text()
    validate(objects)
    assert not [item for item in product.findings("k8s", spec).values() if item.level == "error"]
    for kind, replica in replicas(objects[1]).items():
        assert (kind, violations(replica["template"]["spec"])) == ("Worker", [])


def preparation(**changes: Any) -> list[Any]:
    """Returns the objects of a preparation, about which lint finds nothing."""
    backend = product.backend("k8s")
    own = backend.preparation(JobSpec.of({**GPU, **changes}))
    assert [finding for finding in backend.lint(own) if finding.level != "note"] == []
    return list(backend.manifests(own))


def test_prepare_renders_a_valid_job() -> None:
    objects = preparation()
    validate(objects)
    pod = objects[1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert violations(pod) == [] and not any(mount.get("readOnly") for mount in container["volumeMounts"])
    assert objects[1]["metadata"]["name"] == "big-prepare" and "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "shard" in container["command"]
    long = "a" * 40
    bucket = {"shards": "s3://bucket/digits", "volumes": [], "k8s": {"patch": {"spec": {"nprocPerNode": "9"}}}}
    for kind in ("PyTorchJob", "TrainJob"):  # LS001 refuses names that are too long
        names = {preparation(k8s={"kind": kind}, name=f"{long}{end}")[1]["metadata"]["name"] for end in ("", "b", "c")}
        assert len(names) == 3 and max(map(len, names)) == 48 and f"{long}-prepare" in names
    assert preparation(**bucket)[1]["spec"]["nprocPerNode"] == "1", "the patch is for the job"
    with pytest.raises(UserError, match="shards"):
        product.backend("k8s").preparation(JobSpec.of(SPECS["cpu"]))


def test_a_trainjob_may_mount_one_claim_twice() -> None:
    """A TrainJob may mount each volume once, so the claim is two volumes. In a PyTorchJob it is one volume."""
    volumes = [{"claim": "a", "path": "/runs"}, {"claim": "a", "path": "/data", "read_only": True}]
    for kind, count in (("TrainJob", 2), ("PyTorchJob", 1)):
        spec = JobSpec.of({**GPU, "volumes": volumes, "k8s": {"kind": kind}})
        objects, _ = product.manifests("k8s", spec)
        validate(objects)
        pod = worker(**spec.plain()) if kind == "PyTorchJob" else trainjob_pod(objects[1])
        claims = [
            item["persistentVolumeClaim"]["claimName"] for item in pod["volumes"] if "persistentVolumeClaim" in item
        ]
        assert claims == ["a"] * count
        names = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
        assert kind == "PyTorchJob" or len(set(names)) == len(names)


def trainjob_pod(job: dict[str, Any]) -> dict[str, Any]:
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("job", "rendered"), [("job.yaml", "pytorchjob"), ("examples/rdma.yaml", "rdma")])
def test_the_examples_do_not_drift(job: str, rendered: str) -> None:
    objects, text = product.manifests("k8s", JobSpec.load(ROOT / job))
    assert (ROOT / f"deploy/k8s/example-{rendered}.yaml").read_text() == text, "make generate"
    validate(objects)


def worker(**values: Any) -> dict[str, Any]:
    """Returns the pod spec of a job."""
    (_, job), _ = product.manifests("k8s", JobSpec.of(values))
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def test_what_the_kubelet_would_expand_is_escaped() -> None:
    pod = worker(name="a", command=["echo", "$(PATH) $HOME $$"], image="localhost:5000/a:1", env={"A": "$(B)"})
    assert pod["containers"][0]["command"][-1] == "$$(PATH) $$HOME $$$$"
    assert {"name": "A", "value": "$$(B)"} in pod["containers"][0]["env"]


@pytest.mark.promise("growth")
def test_a_thousand_nodes_cost_what_two_cost() -> None:
    """The test counts function calls: load does not change them."""

    def calls(nodes: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(product.manifests, "k8s", JobSpec.of({**GPU, "nodes": nodes}))
        return sum(entry.callcount for entry in profile.getstats())

    calls(2)  # the first one fills caches
    assert calls(1000) < 1.05 * calls(2)


@pytest.mark.promise("other-users")
def test_the_nodes_secret_comes_from_a_secret_of_the_users_own() -> None:
    """The launchers authenticate each other with it. No manifest contains it."""
    pod = worker(**{**GPU, "secrets": {"LOCKSTEP_SECRET": {"secret": "team", "key": "nodes"}}})
    (item,) = [variable for variable in pod["containers"][0]["env"] if variable["name"] == "LOCKSTEP_SECRET"]
    assert item == {"name": "LOCKSTEP_SECRET", "valueFrom": {"secretKeyRef": {"name": "team", "key": "nodes"}}}


sizes = st.tuples(st.integers(1, 5000), st.sampled_from(["Mi", "Gi"])).map(lambda pair: f"{pair[0]}{pair[1]}")
word = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=70)
words = st.text("abcXYZ $()'\"\\ä=#:-", max_size=8) | st.text(max_size=3)
names = st.sampled_from(["a", "job-1", "job-2"]) | st.sampled_from(["b", "c"]) | word
programs = st.sampled_from([{"recipe": "smoke"}, {"recipe": "resnet18"}, {"recipe": "bag_of_tricks"}, {}]) | (
    st.lists(words, min_size=1, max_size=3).map(lambda words: {"command": words})
)
spec_values = st.fixed_dictionaries(
    {"name": names, "image": st.sampled_from(["localhost:5000/a:1"] * 3 + [None]), "what": programs},
    optional={
        "nodes": st.integers(1, 4), "gpus": st.sampled_from([0, 4, 8]), "ranks_per_node": st.integers(1, 2),
        "cpus": st.floats(0.1, 200), "memory": sizes, "shm": sizes, "time_limit": st.sampled_from(["90s", "2h", "1d12h"]),
        "max_restarts": st.integers(0, 20), "grace_seconds": st.integers(5, 600),
        "run_dir": st.sampled_from(["/runs/a", "/data/x", "relative", "/tmp/a"]),
        "volumes": st.lists(
            st.fixed_dictionaries(
                {"claim": st.sampled_from(["runs", "data"]), "path": st.sampled_from(["/runs", "/data", "/x", "/tmp/y", "/dev/shm"])},
                optional={"read_only": st.booleans()},
            ),
            max_size=2,
        ),
        "env": st.dictionaries(st.sampled_from(["A", "B_1", "C", "NCCL_DEBUG", "RANK", "API_TOKEN"]), words, max_size=2),
        "secrets": st.dictionaries(st.sampled_from(["TOKEN", "A"]), st.just({"secret": "s", "key": "k"}), max_size=1),
        "metrics_port": st.integers(23450, 23460),
        "k8s": st.fixed_dictionaries(
            {},
            optional={
                "kind": st.sampled_from(["PyTorchJob", "PyTorchJob", "TrainJob"]), "queue": st.just("q"),
                "spread": st.sampled_from(["required", "preferred", "none"]),
                "rdma": st.dictionaries(st.sampled_from(["rdma/a", "vpc.amazonaws.com/efa"]), st.integers(0, 4), max_size=2),
                "hugepages": sizes, "node_selector": st.dictionaries(st.just("pool"), word, max_size=1),
                "tolerations": st.lists(st.fixed_dictionaries({"key": st.just("gpu")}), max_size=2),
            },
        ),
    },
)  # fmt: skip


def test_a_label_without_a_value_selects_nodes() -> None:
    """`node-role.kubernetes.io/gpu`, for example, has no value."""
    pool = {"node-role.kubernetes.io/gpu": ""}
    values = {"name": "a", "recipe": "smoke", "image": "localhost:5000/a:1", "k8s": {"node_selector": pool}}
    (_, job), _ = product.manifests("k8s", JobSpec.of(values))
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["nodeSelector"] == pool


def test_any_spec_renders_a_valid_manifest_or_is_refused_in_one_line() -> None:
    counts = {"refused": 0, "lint": 0, "valid": 0}

    @settings(max_examples=250, deadline=None)
    @given(spec_values)
    def check(values: dict[str, Any]) -> None:
        counts[_outcome({**{key: value for key, value in values.items() if key != "what"}, **values["what"]})] += 1

    check()
    assert min(counts.values()) >= 10, f"the specs are too much alike: {counts}"


def _outcome(values: dict[str, Any]) -> str:
    try:
        spec = JobSpec.of(values)
    except UserError as error:
        assert "\n" not in str(error)
        return "refused"
    plain = copy.deepcopy(spec.plain())
    objects, text = product.manifests("k8s", spec)
    assert text == product.manifests("k8s", JobSpec.of(json.loads(json.dumps(plain))))[1], "render is not pure"
    assert list(yaml.load_all(text, LOADER)) == objects
    assert spec.plain() == plain
    findings = product.findings("k8s", spec, objects).values()
    assert all("\n" not in item.message for item in findings)
    if any(item.level == "error" for item in findings):
        return "lint"
    validate(objects)
    return "valid"
