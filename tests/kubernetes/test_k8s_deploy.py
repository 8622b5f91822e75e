"""deploy/k8s builds and validates, and its Role grants what the backend calls: no less, and hardly more."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from k8s_cluster import Cluster

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.kubernetes.pod_rules import MONITORED
from lockstep.jobs.spec.model import JobSpec
from tests.processes import require

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy/k8s"
CORE = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")


def documents(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


@pytest.mark.parametrize(
    ("overlay", "count"), [("base", 7), ("overlays/single-node", 7), ("overlays/full", 13), ("overlays/debug", 9)]
)
def test_kustomize_builds_valid_objects(overlay: str, count: int) -> None:
    require(shutil.which("kubectl"), "kubectl (with kustomize in it) is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(DEPLOY / overlay)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    assert len(objects) == count
    for item in objects:
        if item["apiVersion"] in CORE:
            kubernetes_validate.validate(item, "1.32", strict=True)
        namespaced = item["kind"] not in ("Namespace", "ClusterQueue", "ResourceFlavor")
        assert (item["metadata"].get("namespace") == "lockstep") == namespaced, item["kind"]
    modes = {
        mode for item in objects if item["kind"] == "PersistentVolumeClaim" for mode in item["spec"]["accessModes"]
    }
    assert modes == ({"ReadWriteOnce"} if "single" in overlay else {"ReadWriteMany"})


def test_what_the_files_hold_is_valid_before_kustomize_has_changed_it() -> None:
    """Needs no kubectl."""
    files = [path for path in DEPLOY.rglob("*.yaml") if path.name != "kustomization.yaml"]
    objects = [item for path in files for item in documents(path.read_text()) if item.get("apiVersion") in CORE]
    for item in objects:
        kubernetes_validate.validate(item, "1.32", strict=True)
    assert {"Namespace", "Role", "RoleBinding", "ServiceAccount", "NetworkPolicy", "PersistentVolumeClaim"} <= {
        item["kind"] for item in objects
    }


def test_every_file_is_part_of_a_kustomization() -> None:
    """A check that needs no kustomize: what a kustomization names is there, and what is there is named."""
    for path in DEPLOY.rglob("kustomization.yaml"):
        (value,) = documents(path.read_text())
        generated = [name for item in value.get("configMapGenerator", []) for name in item["files"]]
        named = [*value.get("resources", []), *value.get("components", []), *generated]
        assert all((path.parent / name).exists() for name in named), path
        here = {item.name for item in path.parent.iterdir() if item.is_file()} - {"kustomization.yaml"}
        assert here == {name for name in named if "/" not in name}, path


def test_the_examples_volumes_are_those_of_the_base() -> None:
    claims = {item["metadata"]["name"] for item in documents((DEPLOY / "base/volumes.yaml").read_text())}
    job = documents((DEPLOY / "example-pytorchjob.yaml").read_text())[1]
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    used = {item["persistentVolumeClaim"]["claimName"] for item in pod["volumes"] if "persistentVolumeClaim" in item}
    assert used == claims


def test_the_role_holds_what_doctor_asks_for() -> None:
    from lockstep.jobs.kubernetes.checks import CODE_RIGHTS, RIGHTS

    role = next(item for item in documents((DEPLOY / "base/rbac.yaml").read_text()) if item["kind"] == "Role")
    granted = {
        (verb, group, resource) for rule in role["rules"] for verb in rule["verbs"] for group in rule["apiGroups"]
        for resource in rule["resources"]
    }  # fmt: skip
    for verb, group, resource, sub in (*RIGHTS, *CODE_RIGHTS):
        assert (verb, group, f"{resource}/{sub}" if sub else resource) in granted
    assert not any(resource == "secrets" or "*" in (verb, resource) for verb, _, resource in granted)


def test_the_debug_component_holds_what_exec_needs_and_the_base_does_not() -> None:
    from lockstep.jobs.kubernetes.checks import EXEC_RIGHTS

    def granted(file: str) -> set[tuple[str, str]]:
        role = next(item for item in documents((DEPLOY / file).read_text()) if item["kind"] == "Role")
        return {(verb, resource) for rule in role["rules"] for verb in rule["verbs"] for resource in rule["resources"]}

    wanted = {(verb, f"{resource}/{sub}") for verb, _, resource, sub in EXEC_RIGHTS}
    assert granted("components/debug/rbac.yaml") == wanted and not wanted & granted("base/rbac.yaml")


def test_the_role_holds_what_the_backend_calls(backend: KubernetesBackend, cluster: Cluster) -> None:
    """A job's whole life, request by request."""
    spec = JobSpec(name="smoke", recipe="smoke", image="registry.example/a:1", shards="/data/digits", k8s={"queue": "gpu"},
                   volumes=[{"claim": "data", "path": "/data"}])  # fmt: skip
    backend.prepare(spec)
    backend.submit(spec)
    backend.status("smoke")
    labels = {"lockstep/job": "smoke"}
    cluster.put("pods", {"metadata": {"name": "smoke-worker-0", "labels": labels}, "status": {"phase": "Running"}})
    cluster.logs["smoke-worker-0"] = ['2026-01-01T00:00:00Z [rank 0] {"event": "done", "steps": 3}']
    assert backend.summary("smoke") == {"steps": 3} and len(backend.list()) == 1
    backend.wait("smoke", 2)
    backend.cancel("smoke")
    (role,) = [item for item in documents((DEPLOY / "base/rbac.yaml").read_text()) if item["kind"] == "Role"]
    granted = {
        (verb, group, resource) for rule in role["rules"] for verb in rule["verbs"] for group in rule["apiGroups"]
        for resource in rule["resources"]
    }  # fmt: skip
    called = set()
    for method, path, query, _ in cluster.requests:
        match = re.fullmatch(r"/apis?/(?:([^/]+)/)?v[^/]+/namespaces/team/([a-z]+)(?:/([^/]+)(/log)?)?", path)
        assert match is not None, f"{path} is not in the job's namespace"
        group, resource, name, sub = match.groups(default="")
        reading = "watch" if query.get("watch") else "get" if name else "list"
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "GET": reading}[method]
        called.add((verb, group, resource + sub))
    assert called <= granted, called - granted
    assert {verb for verb, *_ in called} == {"create", "patch", "delete", "get", "list", "watch"}


def test_the_pod_monitor_names_the_ports_that_render_makes() -> None:
    (monitor,) = documents((ROOT / "deploy/observability/kubernetes/podmonitor.yaml").read_text())
    ports = [item["port"] for item in monitor["spec"]["podMetricsEndpoints"]]
    assert ports == [f"metrics-{rank}" for rank in range(MONITORED)]
    job = documents((DEPLOY / "example-pytorchjob.yaml").read_text())[1]
    labels = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert all(re.fullmatch(r"[a-z-]+\d", port) and len(port) <= 15 for port in ports)
