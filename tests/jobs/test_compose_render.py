"""Compose files: golden files, purity, every lint rule, Docker's parser, and doctor."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.jobs.helpers import lockstep
from tests.processes import ROOT
from tests.product import JobSpec, UserError, composed, lint_of_compose

GOLDEN = Path(__file__).parent / "golden"
PLAIN: dict[str, Any] = {"name": "small", "recipe": "smoke", "image": "lockstep:1", "nodes": 2, "ranks_per_node": 2}
SPECS: dict[str, dict[str, Any]] = {
    "compose-cpu": PLAIN,
    "compose-gpu": {
        **PLAIN, "name": "big", "recipe": "bag_of_tricks", "nodes": 2, "gpus": 2, "ranks_per_node": 2, "cpus": 8, "memory": "32Gi",
        "shm": "8Gi", "shards": "/data/shards", "secrets": {"WANDB_API_KEY": {"secret": "wandb", "key": "key"}},
        "env": {"PRICE": "5$ a ${NAME}"}, "time_limit": "2h",
        "volumes": [{"claim": "runs", "path": "/runs"}, {"claim": "data", "path": "/data", "read_only": True}],
    },
    "compose-command": {
        "name": "own", "command": ["python", "train.py", "--price", "$5"], "image": "own:1", "run_dir": "/runs/own",
        "compose": {"patch": {"services": {"node-0": {"ports": ["127.0.0.1:9470:9470"]}}}},
    },
}  # fmt: skip


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.of({**PLAIN, **changes})


def patched(node: Any, **changes: Any) -> JobSpec:
    return spec_of(**changes, compose={"patch": {"services": {"node-0": node}}})


def errors(spec: JobSpec) -> set[str]:
    return {item.id for item in lint_of_compose(spec) if item.level == "error"}


@pytest.mark.parametrize("name", SPECS)
def test_golden(name: str) -> None:
    """`GOLDEN=write pytest` rewrites the files: read the diff before you commit it."""
    spec, path = JobSpec.of(SPECS[name]), GOLDEN / f"{name}.yaml"
    text = product.manifest(composed(spec))
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text(), f"GOLDEN=write writes {path} anew"
    assert product.manifest(composed(spec)) == text and not errors(spec)


def test_the_rendered_file_means_the_same_as_the_job() -> None:
    gpu = composed(JobSpec.of(SPECS["compose-gpu"]))["services"]
    assert gpu["node-0"]["environment"]["PRICE"] == "5$$ a $${NAME}", "what a shell would expand"
    assert gpu["node-0"]["environment"]["WANDB_API_KEY"] is None, "taken from the environment, never written"
    ids = [node["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for node in gpu.values()]
    assert ids == [["0", "1"], ["2", "3"]], "two nodes share no GPU"
    own = composed(JobSpec.of(SPECS["compose-command"]))["services"]["node-0"]
    assert own["command"][-1] == "$$5" and own["healthcheck"] == {"disable": True}
    names = list(composed(spec_of(nodes=12))["services"])
    assert names == sorted(names) and names[0] == "node-00" and len(names) == 12, "the rendezvous sorts them as text"
    # Docker mounts a tmpfs with noexec unless an option overrides it: compiled code cannot be loaded from it.
    nodes = composed(spec_of())["services"].values()
    assert all("exec" in node["tmpfs"][0].partition(":")[2].split(",") for node in nodes)


@pytest.mark.parametrize(
    ("changes", "port", "checked"),
    [
        ({}, None, True), ({"metrics_port": 9500}, "9500", True), ({"env": {"LOCKSTEP_METRICS_PORT": "9700"}}, "9700", True),
        ({"overrides": {"metrics.enabled": False}}, None, False), ({"env": {"LOCKSTEP_METRICS_PORT": "0"}}, "0", False),
    ],
)  # fmt: skip
def test_health_is_asked_for_where_it_is_served(changes: dict[str, Any], port: str | None, checked: bool) -> None:
    for node in composed(spec_of(**changes))["services"].values():
        assert (node["environment"].get("LOCKSTEP_METRICS_PORT"), "healthcheck" not in node) == (port, checked)


def test_prepare_writes_to_the_volume_without_a_gpu() -> None:
    project = composed(JobSpec.of(SPECS["compose-gpu"]), prepare=True)
    (service,) = project["services"].values()
    assert " -- python -m lockstep.training shard " in " ".join(service["command"]) and "deploy" not in service
    assert not any(mount.get("read_only") for mount in service["volumes"]), service["volumes"]
    patch = {"services": {"node-1": {"environment": {"NODE": "1"}}}}
    patched = {**SPECS["compose-gpu"], "compose": {"patch": patch}}
    assert composed(JobSpec.of(patched), prepare=True) == project, "the patch is for the job"
    for spec, message in ((spec_of(), "has no shards"), (spec_of(shards="/elsewhere"), "is not on a volume")):
        with pytest.raises(UserError, match=message):
            composed(spec, prepare=True)


PATCHES: list[dict[str, Any]] = [
    {"services": {"node-1": None}}, {"services": {"node-0": {"labels": {"lockstep/job": "other"}}}}, {"name": "other"},
    {"services": {"node-0": {"hostname": "other"}}}, {"networks": {"default": None}},
    {"volumes": [1]},
]  # fmt: skip
"""Patches that would hide a job or its nodes."""
PROVOKED: list[tuple[str, dict[str, Any]]] = [
    *(("LJ011", {"compose": {"patch": patch}}) for patch in PATCHES),
    ("LJ012", {"compose": {"patch": {"services": {"my.own": {"image": "a:1", "privileged": True}}}}}),
    ("LJ012", {"compose": {"patch": {"services": {"node-0": {"read_only": False}}}}}),
    ("LJ005", {"image": None}), ("LJ006", {"env": {"WANDB_API_KEY": "hunter2"}}),
    ("LJ007", {"run_dir": "runs/x"}), ("LJ007", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}]}),
    ("LJ008", {"shards": "/data"}), ("LC011", {"volumes": [{"claim": "scratch", "path": "/scratch"}]}),
    ("LJ009", {"live": True, "nodes": 1}),
]  # fmt: skip


def test_folders_of_the_host_and_gpus_can_be_chosen_and_are_shown() -> None:
    """A user can translate an existing Compose file for torch."""
    node = {"volumes": ["/imagenet:/data:ro", "cache:/cache", {"type": "bind", "source": "/w", "target": "/work"}],
            "deploy": {"resources": {"reservations": {"devices": [{"driver": "nvidia", "device_ids": ["2", "3"]}]}}},
            "network_mode": "host"}  # fmt: skip
    spec = patched(node, gpus=2, image="own:1")
    rendered = composed(spec)["services"]["node-0"]
    assert rendered["volumes"] == [
        {"type": "volume", "source": "run_directory", "target": "/runs"},
        {"type": "bind", "source": "/imagenet", "target": "/data", "read_only": True},
        {"type": "volume", "source": "cache", "target": "/cache"},
        {"type": "bind", "source": "/w", "target": "/work"},
    ]
    (device,) = rendered["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]}
    assert "networks" not in rendered and not errors(spec)
    notes = " ".join(item.message for item in lint_of_compose(spec) if item.level == "note")
    assert "/imagenet" in notes and '"host"' in notes and '"2"' in notes, notes


@pytest.mark.promise("compose")
@pytest.mark.parametrize(("id", "changes"), PROVOKED)
def test_every_rule_is_provoked(id: str, changes: dict[str, Any]) -> None:
    findings = lint_of_compose(spec_of(**changes))
    assert id in {item.id for item in findings}, findings
    assert all(item.message and "\n" not in item.message for item in findings)


def test_a_good_job_provokes_none_and_every_rule_is_tried(tmp_path: Path) -> None:
    assert lint_of_compose(spec_of()) == []
    rules = json.loads(lockstep(tmp_path, "lint", "--rules", "--json").stdout)
    assert {rule["id"] for rule in rules if rule["id"].startswith("LC")} == {
        id for id, _ in PROVOKED if id.startswith("LC")
    }


@pytest.mark.parametrize(
    "patch", [{"services": 3}, {"services": {"node-0": 3}}, {"services": {"node-0": {"labels": 3}}}], ids=str
)
def test_lint_survives_any_patch(patch: dict[str, Any]) -> None:
    assert errors(spec_of(compose={"patch": patch})), "a file that Compose would refuse is not submitted"


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `docker` on PATH with a shell script."""
    (folder / "docker").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_engine_or_a_client_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/none.sock"
    monkeypatch.setenv("DOCKER_HOST", where)
    script = f"echo 'Cannot connect to the Docker daemon at {where}. Is the docker daemon running?' >&2; exit 1"
    program(tmp_path, script, monkeypatch)
    process = lockstep(tmp_path, "list", "compose")
    assert (process.returncode, process.stderr.count("\n")) == (69, 1) and where in process.stderr, process
    checks = json.loads(lockstep(tmp_path, "doctor", "compose", "--json").stdout)
    assert [check["result"] for check in checks] == ["missing"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    process = lockstep(tmp_path, "list", "compose")
    assert (process.returncode, process.stderr.count("\n")) == (2, 1) and "docker is not installed" in process.stderr, (
        process
    )


@pytest.mark.parametrize("message", ["unexpected EOF", "Error response from daemon: context deadline exceeded"])
def test_an_engine_that_gives_no_answer_says_nothing_about_a_job(
    message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path, f"echo '{message}' >&2; exit 1", monkeypatch)
    for words in (("status", "compose", "mine"), ("cancel", "compose", "mine"), ("list", "compose")):
        done = lockstep(tmp_path, *words)
        assert done.returncode == 69 and "no container engine answers" in done.stderr, (words, done)


@pytest.mark.containers
@pytest.mark.parametrize("name", [*SPECS, "docker/monitoring.yaml"])
def test_docker_reads_it(engine: str, name: str, tmp_path: Path) -> None:
    """Compose's parser and schema accept the file and read the values that the spec has."""
    file = ROOT / name if name.endswith(".yaml") else GOLDEN / f"{name}.yaml"
    words = ["docker", "compose", "-f", str(file), "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "WANDB_API_KEY": "w"})
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    if name in SPECS:
        spec, node = JobSpec.of(SPECS[name]), config["services"]["node-0"]
        assert node["mem_limit"] == str(composed(spec)["services"]["node-0"]["mem_limit"])
        assert json.loads(node["labels"]["lockstep/spec"].replace("$$", "$")) == spec.record()
    else:
        assert all(service["read_only"] and service["cap_drop"] == ["ALL"] for service in config["services"].values())


@pytest.mark.containers
def test_doctor(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(image="lockstep-test:nowhere", memory="900Gi", cpus=512, gpus=8, secrets={"TOKEN_OF_TEST": {"secret": "a", "key": "b"}},
                   volumes=[{"claim": "lockstep-test-none", "path": "/runs"}])  # fmt: skip
    checks = {item.name: item for item in product.backend("compose").doctor(spec)}
    assert checks["engine"].result == checks["compose"].result == checks["limits"].result == "ok"
    for name in ("memory", "cpus", "secret"):
        assert checks[name].result == "missing", checks[name]
    assert checks["image"].result == "warning"
    monkeypatch.setenv("TOKEN_OF_TEST", "x")
    checks = {item.name: item for item in product.backend("compose").doctor(spec_of(memory="1Mi", cpus=1))}
    assert checks["memory"].result == "ok"
