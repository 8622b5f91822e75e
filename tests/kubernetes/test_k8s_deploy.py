"""deploy/k8s builds and validates, and its Role grants the backend's requests and hardly more."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import product as pairs
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from k8s_cluster import Cluster
from k8s_schema import validator

from tests.jobs.helpers import lockstep
from tests.processes import ROOT, require
from tests.product import JobSpec

DEPLOY = ROOT / "deploy/k8s"


def documents(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if item]


def test_all_components_build_on_the_base(tmp_path: Path) -> None:
    """All components build together, with kubectl's kustomize."""
    kubectl = shutil.which("kubectl")
    require(kubectl, "kubectl is not installed")
    components = sorted(path.name for path in (DEPLOY / "components").iterdir())
    shutil.copytree(DEPLOY, tmp_path / "k8s")
    shutil.copytree(ROOT / "deploy/observability", tmp_path / "observability")
    whole = tmp_path / "k8s/overlays/whole"
    whole.mkdir()
    kinds = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    parts = {**kinds, "resources": ["../../base"], "components": [f"../../components/{name}" for name in components]}
    (whole / "kustomization.yaml").write_text(yaml.safe_dump(parts))
    done = subprocess.run([str(kubectl), "kustomize", str(whole)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = documents(done.stdout)
    (egress,) = [item for item in built if item["metadata"]["name"] == "closed-egress"]
    selector = egress["spec"]["egress"][0]["to"][0]["podSelector"]["matchLabels"]
    assert selector.items() <= example()["metadata"]["labels"].items(), "a job's pods may reach each other"
    ports = {(one["port"], one["protocol"]) for one in egress["spec"]["egress"][1]["ports"]}
    assert ports == set(pairs((53, 5353), ("UDP", "TCP"))), "OpenShift's DNS listens on 5353"
    core_objects = [item for item in built if item["apiVersion"] == "v1" or ".k8s.io/" in item["apiVersion"]]
    core_objects = [item for item in core_objects if "kueue" not in item["apiVersion"]]
    assert {"ResourceQuota", "PriorityClass", "ResourceClaimTemplate", "PodGroup"} <= {
        item["kind"] for item in core_objects
    }
    for item in core_objects:
        kubernetes_validate.validate(item, "1.36", strict=True)


@pytest.mark.parametrize("overlay", sorted(path.name for path in (DEPLOY / "overlays").iterdir()))
def test_every_overlay_builds_and_is_in_the_table(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    require(kubectl, "kubectl is not installed")
    done = subprocess.run(
        [str(kubectl), "kustomize", str(DEPLOY / "overlays" / overlay)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    claims = [item for item in documents(done.stdout) if item["kind"] == "PersistentVolumeClaim"]
    modes = {mode for item in claims for mode in item["spec"]["accessModes"]}
    assert modes == {"ReadWriteOnce" if "single" in overlay else "ReadWriteMany"}
    assert f"`make install-k8s OVERLAY=overlays/{overlay}`" in (ROOT / "docs/install.md").read_text()


@pytest.mark.parametrize(("component", "reference"), [("dra", "resourceClaims"), ("gang", "schedulingGroup")])
def test_a_job_takes_a_component_with_the_patch_that_it_prints(component: str, reference: str, tmp_path: Path) -> None:
    text = (DEPLOY / f"components/{component}/kustomization.yaml").read_text()
    patch = "\n".join(line[3:] for line in text.partition("#   k8s:\n")[2].splitlines() if line.startswith("#  "))
    (tmp_path / "job.yaml").write_text(f"name: a\nrecipe: smoke\nimage: localhost:5000/a:1\ngpus: 4\nk8s:\n{patch}\n")
    job = documents(lockstep(tmp_path, "render", "k8s", "job.yaml", "--set", "k8s.kind=PyTorchJob").stdout)[1]
    (fault, *_) = [*validator("PyTorchJob").iter_errors(job), None]
    assert fault is None, fault
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert reference in pod and ("nvidia.com/gpu" in json.dumps(pod)) == (component != "dra")


def example() -> dict[str, Any]:
    """Returns the pod template of the example."""
    job = documents((DEPLOY / "example-pytorchjob.yaml").read_text())[1]
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]


def rules(file: str) -> list[dict[str, Any]]:
    """Returns the rules of a file's Role."""
    role_rules = next(item for item in documents((DEPLOY / file).read_text()) if item["kind"] == "Role")["rules"]
    return role_rules  # type: ignore[no-any-return]


def grants(file: str) -> set[tuple[str, str, str]]:
    """Returns (verb, group, resource) of each grant in a file's Role."""
    return {
        (verb, *pair)
        for rule in rules(file)
        for verb in rule["verbs"]
        for pair in pairs(rule["apiGroups"], rule["resources"])
    }


def test_the_examples_volumes_and_ports_are_those_of_what_is_installed() -> None:
    claims = {item["metadata"]["name"] for item in documents((DEPLOY / "base/volumes.yaml").read_text())}
    volumes = example()["spec"]["volumes"]
    assert {item["persistentVolumeClaim"]["claimName"] for item in volumes if "persistentVolumeClaim" in item} == claims
    (monitor,) = documents((ROOT / "deploy/observability/kubernetes/podmonitor.yaml").read_text())
    ports = [item["port"] for item in monitor["spec"]["podMetricsEndpoints"]]
    (container,) = example()["spec"]["containers"]
    metrics_ports = [port["name"] for port in container["ports"] if port["name"].startswith("metrics")]
    assert metrics_ports and set(metrics_ports) <= set(ports) and all(len(port) <= 15 for port in ports)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= example()["metadata"]["labels"].items()


@pytest.mark.promise("k8s-truth")
def test_the_roles_hold_what_is_called_and_asked_for(
    backend: Any, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job is prepared, submitted, watched and cancelled. The roles grant each of these requests and those of `doctor`, and nothing
    on secrets. `exec` has a component."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.py").touch()
    fields = {"code": str(tmp_path / "own"), "k8s": {"queue": "gpu"}, "volumes": [{"claim": "data", "path": "/data"}]}
    values = {"name": "smoke", "recipe": "smoke", "image": "localhost:5000/a:1", "shards": "/data/digits"}
    spec = JobSpec.of({**values, **fields})
    assert backend.prepare(spec).created and not backend.prepare(spec).created
    cluster.set_conditions("smoke-prepare", {"type": "Succeeded"})
    assert not backend.prepare(spec).created, "it has written them"
    assert "smoke-prepare has written the shards" in capsys.readouterr().err
    backend.submit(spec)
    backend.status("smoke")
    cluster.pod("smoke", "smoke-worker-0", {"phase": "Running"})
    cluster.logs["smoke-worker-0"] = ['2026-01-01T00:00:00Z [rank 0] {"event": "done", "steps": 3}']
    assert backend.summary("smoke") == {"steps": 3} and len(backend.list()) == 2
    backend.wait("smoke", 2)
    backend.cancel("smoke")
    calls = set()
    for method, path, query, _ in cluster.requests:
        match = re.fullmatch(r"/apis?/(?:([^/]+)/)?v[^/]+/namespaces/team/([a-z]+)(?:/([^/]+)(/log)?)?", path)
        assert match is not None, f"{path} is not in the job's namespace"
        group, resource, name, sub = match.groups(default="")
        reading = "watch" if query.get("watch") else "get" if name else "list"
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete", "GET": reading}[method]
        calls.add((verb, group, resource + sub))
    assert {verb for verb, *_ in calls} == {"create", "patch", "delete", "get", "list"}
    assert calls <= grants("base/rbac.yaml"), calls - grants("base/rbac.yaml")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec.plain()))
    for files, results in (
        (("base",), {"rights": "ok", "exec": "note"}),
        (("base", "components/debug"), {"rights": "ok"}),
    ):
        cluster.allow(*({"rules": rules(f"{file}/rbac.yaml")} for file in files))
        rows = json.loads(lockstep(tmp_path, "doctor", "k8s", "job.yaml", "--json").stdout)
        assert {row["name"]: row["result"] for row in rows if row["name"] in ("rights", "exec")} == results, rows
    assert not any(resource == "secrets" or "*" in (verb, resource) for verb, _, resource in grants("base/rbac.yaml"))
