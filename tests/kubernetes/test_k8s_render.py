"""Manifests: golden files, purity, strict CRD schemas, Kubernetes' own schemas, and 500 specs that hypothesis makes."""

from __future__ import annotations

import copy
import cProfile
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from crds import strip
from hypothesis import given, settings
from hypothesis import strategies as st
from k8s_security import violations

from lockstep.jobs.checks.rule import errors
from lockstep.jobs.kubernetes import preparejob
from lockstep.jobs.kubernetes.render import kubernetes as render
from lockstep.jobs.kubernetes.rules import RULES
from lockstep.jobs.manifest import to_yaml
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

GPU: dict[str, Any] = {
    "name": "big", "recipe": "bag_of_tricks", "image": "registry.example/lockstep@sha256:" + "a" * 64, "nodes": 2, "gpus": 4,
    "cpus": 16, "memory": "64Gi", "shm": "16Gi", "time_limit": "2h", "shards": "/data",
    "secrets": {"WANDB_API_KEY": {"secret": "wandb", "key": "key"}}, "env": {"EXPERIMENT": "1e3"},
    "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
    "k8s": {"namespace": "team", "socket_interface": "eth0", "priority_class": "high", "image_pull_secrets": ["pull"]},
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "gpu": GPU,
    "cpu": {"name": "small", "recipe": "smoke", "image": "registry.example/lockstep:1", "ranks_per_node": 2, "run_dir": "/tmp/run"},
    "elastic": {**GPU, "name": "flex", "elastic": {"min_nodes": 1, "max_nodes": 4}},
    "kueue": {**GPU, "name": "queued", "k8s": {**GPU["k8s"], "queue": "gpu-queue", "topology": "required"}},
    "efa": {
        **GPU, "name": "efa", "k8s": {**GPU["k8s"], "rdma": {"vpc.amazonaws.com/efa": 4}, "hugepages": "5120Mi"},
    },
    "master": {**GPU, "name": "old", "k8s": {**GPU["k8s"], "master": True}},
    "trainjob": {
        **GPU, "name": "second",
        "k8s": {"namespace": "team", "image_pull_secrets": ["pull"], "kind": "TrainJob", "runtime": "lockstep"},
    },
    "code": {**GPU, "name": "own", "code": {"hash": "c0de" * 16, "packed": 2_000_000}},
    "trainjob-code": {
        **GPU, "name": "second", "code": {"hash": "c0de" * 16, "packed": 1},
        "k8s": {"namespace": "team", "kind": "TrainJob", "runtime": "lockstep"},
    },
}  # fmt: skip


@cache
def crd(kind: str) -> dict[str, Any]:
    return json.loads((strip.HERE / f"{kind.lower()}.json").read_text())


def _strict(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _strict(item)
    elif isinstance(node, dict):
        if (
            "properties" in node
            and "additionalProperties" not in node
            and not node.get("x-kubernetes-preserve-unknown-fields")
        ):
            node["additionalProperties"] = False
        if node.get("x-kubernetes-int-or-string"):
            node.pop("type", None)
            node["anyOf"] = [{"type": "integer"}, {"type": "string"}]
        for value in list(node.values()):
            _strict(value)


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The CRD's schema with unknown fields forbidden, as the API server treats them under strict validation."""
    found = copy.deepcopy(crd(kind)["openAPIV3Schema"])
    _strict(found)
    found["properties"]["metadata"] = {"type": "object"}  # the API machinery's own
    return jsonschema.Draft202012Validator(found)


def validate(objects: list[dict[str, Any]]) -> None:
    """Against the CRD, against Kubernetes' schemas, and for what schemas miss."""
    policy, job = objects
    kubernetes_validate.validate(policy, "1.32", strict=True)
    assert job["apiVersion"] == crd(job["kind"])["apiVersion"]
    complaints = [f"{'.'.join(map(str, e.path))}: {e.message[:200]}" for e in validator(job["kind"]).iter_errors(job)]
    assert not complaints, complaints[:3]
    if job["kind"] != "PyTorchJob":
        return
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) <= {"Master", "Worker"}
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    for key, replica in replicas.items():
        template = replica["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x", **template["metadata"]},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, "1.32", strict=True)
        assert len(f"{job['metadata']['name']}-{key.lower()}-{replica['replicas'] - 1}") <= 63
        (container,) = template["spec"]["containers"]
        assert container["name"] == "pytorch" and container["image"]
        names = [item["name"] for item in container["env"]]
        assert len(names) == len(set(names))
        volumes = {item["name"] for item in template["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(paths) == len(set(paths))
        assert all(len(port["name"]) <= 15 for port in container["ports"])
        assert all(value != "" for value in container["resources"]["limits"].values())


@pytest.mark.parametrize("name", SPECS)
def test_golden(name: str) -> None:
    """`GOLDEN=write pytest` writes the files anew: read the diff before you commit it."""
    spec = JobSpec.of(SPECS[name])
    text = to_yaml(render(spec))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert not errors(RULES.apply(spec, render(spec)))


@pytest.mark.parametrize("name", SPECS)
def test_manifests_are_valid(name: str) -> None:
    validate(render(JobSpec.of(SPECS[name])))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("gpu", ("spec", "nprocPerNode"), 4),
        ("gpu", ("spec", "runPolicy", "clean_pod_policy"), "Running"),
        ("gpu", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "tolerations"), [{"keys": "gpu"}]),
        ("trainjob", ("spec", "trainer", "numNodes"), "two"),
        ("trainjob", ("spec", "podTemplateOverrides"), []),  # its name before v2.2
    ],
)
def test_the_strict_schema_finds_what_the_api_server_would_drop_or_refuse(
    name: str, path: tuple[str, ...], value: Any
) -> None:
    _, job = render(JobSpec.of(SPECS[name]))
    assert not list(validator(job["kind"]).iter_errors(job))
    place = job
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert len(list(validator(job["kind"]).iter_errors(job))) == 1


@pytest.mark.parametrize("kind", strip.PINNED)
def test_the_schemas_are_those_that_make_crds_writes(kind: str) -> None:
    text = (strip.HERE / f"{kind.lower()}.json").read_text()
    assert strip.pretty(crd(kind)) + "\n" == text and crd(kind)["kind"] == kind
    assert strip.without_descriptions(crd(kind)["openAPIV3Schema"]) == crd(kind)["openAPIV3Schema"]
    assert strip.PINNED[kind][1] in crd(kind)["source"], "make crds"


def test_a_schema_loses_its_descriptions_and_nothing_else() -> None:
    text = {"type": "string", "description": "gone"}
    schema = {
        "description": "gone",
        "properties": {"description": text, "b": {"items": [text]}},
        "default": {"description": 1},
    }
    version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
    crd = {"spec": {"group": "kubeflow.org", "names": {"kind": "PyTorchJob"}, "versions": [version]}}
    found = strip.stripped("PyTorchJob", yaml.safe_dump(crd))
    kept = {"type": "string"}
    wanted = {"properties": {"description": kept, "b": {"items": [kept]}}, "default": {"description": 1}}
    assert (found["apiVersion"], found["openAPIV3Schema"]) == ("kubeflow.org/v1", wanted)


def test_prepare_renders_a_valid_job() -> None:
    (job,) = preparejob.render(JobSpec.of(GPU))
    kubernetes_validate.validate(job, "1.32", strict=True)
    mounts = job["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert not any(mount.get("readOnly") for mount in mounts)
    with pytest.raises(UserError, match="has no shards"):
        preparejob.render(JobSpec.of(SPECS["cpu"]))


def test_the_example_does_not_drift() -> None:
    spec = JobSpec.load(ROOT / "job.yaml")
    assert (ROOT / "deploy/k8s/example-pytorchjob.yaml").read_text() == to_yaml(render(spec)), "make example-k8s"
    validate(render(spec))


def test_what_the_kubelet_would_expand_is_escaped() -> None:
    spec = JobSpec.of(
        {"name": "a", "command": ["echo", "$(PATH) $HOME $$"], "image": "registry.example/a:1", "env": {"A": "$(B)"}}
    )
    container = render(spec)[1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["command"][-1] == "$$(PATH) $$HOME $$$$"
    assert {"name": "A", "value": "$$(B)"} in container["env"]


def test_yaml_texts_stay_texts_in_every_yaml() -> None:
    tricky = [
        "1e3",
        "0o7",
        "y",
        "No",
        "null",
        "~",
        "1_000",
        "0x1F",
        "12:30",
        "=",
        "<<",
        ".inf",
        "-",
        "",
        "é",
        "a: b",
        "# c",
    ]
    text = to_yaml([{"values": tricky}])
    assert yaml.safe_load(text)["values"] == tricky
    assert all(f'- "{word}"' in text for word in ("1e3", "0o7", "y", "1_000", ".inf"))


def test_a_thousand_nodes_cost_what_two_cost() -> None:
    """Counted in function calls, which no busy machine can falsify."""

    def calls(nodes: int) -> int:
        spec = JobSpec.of({**GPU, "nodes": nodes})
        profile = cProfile.Profile()
        profile.runcall(lambda: to_yaml(render(spec)))
        return sum(entry.callcount for entry in profile.getstats())

    calls(2)  # the first one fills caches
    assert calls(1000) < 1.05 * calls(2)


word = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=70)
sizes = st.tuples(st.integers(1, 5000), st.sampled_from(["Mi", "Gi"])).map(lambda pair: f"{pair[0]}{pair[1]}")
words = st.text("abcXYZ $()'\"\\ä=#:-", max_size=8) | st.text(max_size=3)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2), max_leaves=4,
)  # fmt: skip
patches = st.sampled_from([{}, {"spec": {"runPolicy": {"suspend": True}}}]) | st.dictionaries(
    st.sampled_from(["spec", "metadata", "kind", "status"]),
    st.dictionaries(st.sampled_from(["pytorchReplicaSpecs", "runPolicy", "labels", "name"]), anything, max_size=2) | anything,
    max_size=2,
)  # fmt: skip
names = st.sampled_from(["a", "job-1", "job-2"]) | st.sampled_from(["b", "c"]) | word
programs = st.sampled_from([{"recipe": "smoke"}, {"recipe": "resnet18"}, {"recipe": "bag_of_tricks"}, {}]) | (
    st.lists(words, min_size=1, max_size=3).map(lambda words: {"command": words})
)
spec_values = st.fixed_dictionaries(
    {"name": names, "image": st.just("registry.example/a:1"), "what": programs},
    optional={
        "nodes": st.integers(1, 4), "gpus": st.sampled_from([0, 4, 8]), "ranks_per_node": st.integers(1, 2),
        "cpus": st.floats(0.1, 200), "memory": sizes, "shm": sizes, "time_limit": st.sampled_from(["90s", "2h", "1d12h"]),
        "max_restarts": st.integers(0, 20), "grace_seconds": st.integers(5, 600),
        "elastic": st.fixed_dictionaries({"min_nodes": st.just(1), "max_nodes": st.integers(3, 1200)}),
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
                "topology": st.sampled_from(["required", "preferred"]), "master": st.booleans(),
                "spread": st.sampled_from(["required", "preferred", "none"]),
                "rdma": st.dictionaries(st.sampled_from(["rdma/a", "vpc.amazonaws.com/efa"]), st.integers(0, 4), max_size=2),
                "hugepages": sizes, "node_selector": st.dictionaries(st.just("pool"), word, max_size=1),
                "tolerations": st.lists(st.fixed_dictionaries({"key": st.just("gpu")}), max_size=2), "patch": patches,
            },
        ),
    },
)  # fmt: skip


def test_any_spec_renders_a_valid_manifest_or_is_refused_in_one_line() -> None:
    seen = {"refused": 0, "lint": 0, "patched": 0, "valid": 0}  # patched: whatever the patch did, no traceback

    @settings(max_examples=500, deadline=None)
    @given(spec_values)
    def check(values: dict[str, Any]) -> None:
        seen[_outcome({**{key: value for key, value in values.items() if key != "what"}, **values["what"]})] += 1

    check()
    assert min(seen["refused"], seen["lint"], seen["valid"]) >= 20, f"the specs are too much alike: {seen}"


def _outcome(values: dict[str, Any]) -> str:
    try:
        spec = JobSpec.of(values)
    except UserError as error:
        assert "\n" not in str(error)
        return "refused"
    before = copy.deepcopy(spec.plain())
    objects = render(spec)
    again = render(JobSpec.of(json.loads(json.dumps(before))))
    assert json.dumps(objects) == json.dumps(again), "render is not pure"
    assert list(yaml.load_all(to_yaml(objects), LOADER)) == objects
    assert spec.plain() == before
    found = RULES.apply(spec, objects)
    assert all("\n" not in item.message for item in found)
    if errors(found):
        return "lint"
    if spec.k8s.patch:
        return "patched"
    validate(objects)
    return "valid"


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ("trainjob", "trainjob-code", "master")])
def test_the_default_passes_restricted(name: str) -> None:
    *_, job = render(JobSpec.of(SPECS[name]))
    pods = [item["template"]["spec"] for item in job["spec"]["pytorchReplicaSpecs"].values()]
    assert len(pods) == 1, "a Master's workers get an init container, which is refused"
    assert violations(pods[0], "restricted") == []


def test_on_openshift_the_namespace_gives_the_user_ids() -> None:
    """Its security context constraints refuse a fixed one; root stays refused by runAsNonRoot."""
    spec = JobSpec.of(
        {
            "name": "a",
            "recipe": "smoke",
            "image": "a@sha256:" + "0" * 64,
            "k8s": {"run_as_user": None, "fs_group": None},
        }
    )
    objects = render(spec)
    context = objects[1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    validate(objects)
    assert "LS015" not in {item.id for item in RULES.apply(spec, objects)}
    assert JobSpec.of(spec.plain()).hash() == spec.hash() != JobSpec.of({**spec.plain(), "k8s": {}}).hash()
    context["runAsUser"] = 0
    assert "LS015" in {item.id for item in RULES.apply(spec, objects)}


def test_the_nodes_secret_comes_from_a_secret_of_the_users_own() -> None:
    """By it the launchers know each other. It stands in no manifest."""
    _, job = render(JobSpec.of({**GPU, "secrets": {"LOCKSTEP_SECRET": {"secret": "team", "key": "nodes"}}}))
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (item,) = [one for one in pod["containers"][0]["env"] if one["name"] == "LOCKSTEP_SECRET"]
    assert item == {"name": "LOCKSTEP_SECRET", "valueFrom": {"secretKeyRef": {"name": "team", "key": "nodes"}}}
