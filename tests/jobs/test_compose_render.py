"""Compose files: golden ones, purity, every lint rule provoked, what Docker's own parser says, and doctor."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml

from lockstep.jobs.checks.rule import errors
from lockstep.jobs.compose import checks as compose_doctor
from lockstep.jobs.compose import engine as client
from lockstep.jobs.compose import render as compose
from lockstep.jobs.compose import rules as compose_rules
from lockstep.jobs.compose.backend import ComposeBackend
from lockstep.jobs.compose.observe import explain
from lockstep.jobs.compose.rules import RULES
from lockstep.jobs.manifest import to_yaml
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import METRICS_PORT, UserError
from tests.engine import cpu_image, engine  # noqa: F401 - fixtures
from tests.jobs.helpers import lockstep
from tests.processes import ROOT

GOLDEN = Path(__file__).parent / "golden"
PLAIN: dict[str, Any] = {"name": "small", "recipe": "smoke", "image": "lockstep:1-cpu", "nodes": 2, "ranks_per_node": 2}
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
    "compose-elastic": {**PLAIN, "name": "flex", "nodes": 3, "elastic": {"min_nodes": 2, "max_nodes": 3}},
}  # fmt: skip


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.of({**PLAIN, **changes})


@pytest.mark.parametrize("name", SPECS)
def test_golden(name: str) -> None:
    """GOLDEN=1 writes them anew; then read the difference."""
    text = to_yaml([compose.render(JobSpec.of(SPECS[name]))])
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"GOLDEN=1 writes {path} anew"
    assert to_yaml([compose.render(JobSpec.of(SPECS[name]))]) == text, "same spec, same bytes"
    assert not errors(RULES.apply(JobSpec.of(SPECS[name]), [yaml.safe_load(text)]))


def test_what_a_shell_would_expand_is_literal() -> None:
    file = compose.render(JobSpec.of(SPECS["compose-gpu"]))
    node = file["services"]["node-0"]
    assert node["environment"]["PRICE"] == "5$$ a $${NAME}"
    assert node["environment"]["WANDB_API_KEY"] is None, "taken from the environment, never written"
    own = compose.render(JobSpec.of(SPECS["compose-command"]))["services"]["node-0"]
    assert own["command"][-1] == "$$5" and own["healthcheck"] == {"disable": True}


@pytest.mark.parametrize(
    ("changes", "port", "checked"),
    [
        ({}, None, True),
        ({"metrics_port": 9500}, "9500", True),
        ({"overrides": {"metrics.port": 9600}}, "9600", True),
        ({"overrides": {"metrics.port": 9600}, "env": {"LOCKSTEP_METRICS_PORT": "9700"}}, "9600", True),
        ({"env": {"LOCKSTEP_METRICS_PORT": "9700"}}, "9700", True),
        ({"overrides": {"metrics.address": "0.0.0.0"}}, None, True),
        ({"overrides": {"metrics.address": "any"}}, None, True),
        ({"overrides": {"metrics.enabled": False}}, None, False),
        ({"overrides": {"metrics.port": 0}}, "0", False),
        ({"env": {"LOCKSTEP_METRICS_PORT": "0"}}, "0", False),
        ({"overrides": {"metrics.address": "10.0.0.7"}}, None, False),
    ],
)
def test_health_is_asked_for_where_it_is_served(changes: dict[str, Any], port: str | None, checked: bool) -> None:
    for node in compose.render(spec_of(**changes))["services"].values():
        assert node["environment"].get("LOCKSTEP_METRICS_PORT") == port
        assert ("healthcheck" not in node) == checked


def test_what_was_compiled_can_be_loaded_from_tmp() -> None:
    """A tmpfs of Docker's is noexec unless told otherwise; `test_the_dev_target_compiles` shows that this is enough."""
    files = [compose.render(spec_of()), yaml.safe_load((ROOT / "docker/compose.yaml").read_text())]
    nodes = [service for file in files for name, service in file["services"].items() if name.startswith("node")]
    assert len(nodes) == 3 and all("exec" in node["tmpfs"][0].partition(":")[2].split(",") for node in nodes)


def test_ranks_follow_the_names_of_the_nodes() -> None:
    """The rendezvous sorts nodes by their names as text."""
    names = list(compose.render(spec_of(nodes=12))["services"])
    assert names == sorted(names) and names[0] == "node-00" and len(names) == 12


def test_two_nodes_share_no_gpu() -> None:
    services = compose.render(JobSpec.of(SPECS["compose-gpu"]))["services"].values()
    ids = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services]
    assert ids == [["0", "1"], ["2", "3"]]


def test_prepare_writes_to_the_volume_and_is_no_node() -> None:
    file = compose.render_prepare(JobSpec.of(SPECS["compose-gpu"]))
    (service,) = file["services"].values()
    assert service["entrypoint"] == ["python", "-m", "lockstep.training", "shard"] and "deploy" not in service
    assert not any(mount.get("read_only") for mount in service["volumes"]) and "lockstep/job" not in service["labels"]
    with pytest.raises(UserError, match="has no shards"):
        compose.render_prepare(spec_of())
    with pytest.raises(UserError, match="is not on a volume"):
        compose.render_prepare(spec_of(shards="/elsewhere"))


NODE = ("services", "node-0")
PROVOKED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("LC001", {"image": None}, {}),
    ("LC002", {}, {"services": {"node-1": None}}),
    ("LC002", {}, {"services": {"node-0": {"deploy": {"replicas": 2}}}}),
    ("LC003", {}, {"services": {"node-0": {"entrypoint": ["sh"]}}}),
    ("LC004", {}, {"services": {"node-0": {"read_only": False}}}),
    ("LC004", {}, {"services": {"node-0": {"cap_drop": []}}}),
    ("LC004", {}, {"services": {"node-0": {"security_opt": []}}}),
    ("LC004", {}, {"services": {"node-0": {"privileged": True}}}),
    ("LC004", {}, {"services": {"node-0": {"user": "0:0"}}}),
    ("LC004", {}, {"services": {"node-0": {"cap_add": ["SYS_ADMIN"]}}}),
    ("LC004", {}, {"services": {"node-0": {"devices": ["/dev/sda:/dev/sda"]}}}),
    ("LC004", {}, {"services": {"node-0": {"device_cgroup_rules": ["b *:* rwm"]}}}),
    (
        "LC004",
        {},
        {"services": {"node-0": {"deploy": {"resources": {"reservations": {"devices": [{"capabilities": ["tpu"]}]}}}}}},
    ),
    ("LC004", {}, {"services": {"node-0": {"security_opt": ["no-new-privileges:true", "seccomp:unconfined"]}}}),
    ("LC004", {}, {"services": {"node-0": {"security_opt": ["no-new-privileges:true", "apparmor=unconfined"]}}}),
    ("LC004", {}, {"services": {"node-0": {"security_opt": ["no-new-privileges:true", "label:disable"]}}}),
    ("LC004", {}, {"services": {"node-0": {"security_opt": ["no-new-privileges:true", "no-new-privileges:false"]}}}),
    ("LC004", {}, {"services": {"node-0": {"extends": {"file": "other.yaml", "service": "node"}}}}),
    ("LC004", {}, {"services": {"node-0": {"post_start": [{"command": ["id"], "privileged": True}]}}}),
    ("LC005", {}, {"services": {"node-0": {"network_mode": "host"}}}),
    ("LC005", {}, {"services": {"node-0": {"network_mode": "container:other"}}}),
    ("LC005", {}, {"services": {"node-0": {"pid": "container:other"}}}),
    ("LC005", {}, {"services": {"node-0": {"pid": "service:node-1"}}}),
    ("LC005", {}, {"services": {"node-0": {"ipc": "shareable"}}}),
    ("LC005", {}, {"services": {"node-0": {"uts": "host"}}}),
    ("LC005", {}, {"services": {"node-0": {"cgroup": "host"}}}),
    ("LC005", {}, {"services": {"node-0": {"userns_mode": "host"}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes_from": ["container:other"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": ["/var/run/docker.sock:/var/run/docker.sock"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": ["/:/host"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": ["./src:/app"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": ["~/.ssh:/keys:ro"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": ["${HOME}:/home"]}}}),
    ("LC005", {}, {"services": {"node-0": {"volumes": [{"type": "bind", "source": "/", "target": "/host"}]}}}),
    ("LC005", {}, {"volumes": {"host": {"driver_opts": {"type": "none", "o": "bind", "device": "/"}}}}),
    ("LC005", {}, {"networks": {"default": {"name": "host", "external": True}}}),
    ("LC005", {}, {"include": ["other.yaml"]}),
    ("LC006", {"env": {"WANDB_API_KEY": "hunter2"}}, {}),
    ("LC007", {}, {"services": {"node-0": {"restart": "always"}}}),
    ("LC008", {}, {"services": {"node-0": {"mem_limit": None}}}),
    ("LC009", {"run_dir": "runs/x"}, {}),
    ("LC009", {"volumes": [{"claim": "runs", "path": "/runs", "read_only": True}]}, {}),
    ("LC010", {"shards": "/data"}, {}),
    ("LC011", {"volumes": [{"claim": "scratch", "path": "/scratch"}]}, {}),
    ("LC012", {"image": "lockstep:latest"}, {}),
    ("LC013", {"k8s": {"queue": "gpu"}}, {}),
    ("LC014", {}, {"services": {"node-0": {"volumes": [{"type": "volume", "source": "x", "target": "/x"}]}}}),
    ("LC014", {}, {"services": {"node-0": {"volumes": [{"type": "volume", "source": ["x"], "target": "/x"}]}}}),
    ("LC015", {"ranks_per_node": 3}, {}),
]


@pytest.mark.parametrize(("id", "changes", "patch"), PROVOKED)
def test_every_rule_is_provoked(id: str, changes: dict[str, Any], patch: dict[str, Any]) -> None:
    spec = spec_of(**changes, compose={"patch": patch})
    found = RULES.apply(spec, [compose.render(spec)])
    assert id in {item.id for item in found}, found
    assert all(item.message and "\n" not in item.message for item in found)


def test_the_lists_of_ports_are_as_long_as_the_rule_says() -> None:
    for path in ("deploy/observability/prometheus/compose.yaml", "docker/prometheus.yml"):
        (scrape,) = yaml.safe_load((ROOT / path).read_text())["scrape_configs"]
        ports = [item["port"] for item in scrape["dns_sd_configs"]]
        assert ports == [METRICS_PORT + rank for rank in range(compose_rules.LISTED)]


def test_a_good_job_provokes_none_and_every_rule_is_tried() -> None:
    assert RULES.apply(spec_of(), [compose.render(spec_of())]) == []
    ours = {rule.id for rule in RULES.all() if rule.id.startswith("LC")}
    assert ours == {id for id, *_ in PROVOKED}


@pytest.mark.parametrize(
    "patch",
    [
        {
            "deploy": {
                "resources": {"reservations": {"devices": [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]}}
            }
        },
        {
            "volumes": [
                {"type": "volume", "source": "run_directory", "target": "/runs"},
                {"type": "tmpfs", "target": "/cache"},
            ]
        },
        {"volumes": ["run_directory:/runs", "/cache"]},
        {"network_mode": "none", "ipc": "private"},
        {"security_opt": ["no-new-privileges=true", "seccomp:profile.json"]},
    ],
)
def test_what_opens_no_door_is_let_through(patch: dict[str, Any]) -> None:
    spec = spec_of(compose={"patch": {"services": {"node-0": patch}}})
    assert not {"LC004", "LC005"} & {item.id for item in RULES.apply(spec, [compose.render(spec)])}


@pytest.mark.parametrize(
    "patch", [{"services": None}, {"services": 3}, {"services": {"node-0": 3}}, {"volumes": 3}, {"services": {"node-0": {"volumes": 3}}},
              {"services": {"node-0": {"labels": []}}}, {"services": {"node-0": {"environment": ["A=1", "TOKEN=x"], "cap_drop": 3}}}]
)  # fmt: skip
def test_lint_survives_any_patch(patch: dict[str, Any]) -> None:
    spec = spec_of(compose={"patch": patch})
    found = RULES.apply(spec, [compose.render(spec)])
    assert errors(found), "a file that Compose would refuse is not submitted"


def container(**changes: Any) -> dict[str, Any]:
    state = {"Status": "exited", "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T00:00:00.5Z", **changes}
    return {"State": state, "Config": {"Hostname": "node-0"}, "HostConfig": {"Memory": 1 << 30}}


@pytest.mark.parametrize(
    ("nodes", "said", "cancelled", "state", "code"),
    [
        ([{}, {}], None, False, "succeeded", 0),
        ([{"ExitCode": 1}, {"ExitCode": 75}], None, False, "failed", 1),
        ([{"ExitCode": 2}, {"ExitCode": 1}], None, False, "failed", 2),
        ([{"ExitCode": 75}, {"ExitCode": 75}], None, False, "preempted", 75),
        ([{"ExitCode": 75}, {"ExitCode": 75}], None, True, "cancelled", 75),
        ([{"ExitCode": 137}, {"ExitCode": 1}], None, True, "cancelled", 75),
        ([{"ExitCode": 124}, {"ExitCode": 75}], {"code": 75, "reason": "SIGTERM"}, False, "timed_out", 124),
        ([{"ExitCode": 1}, {"ExitCode": 1}], {"code": 75, "reason": "SIGTERM"}, False, "preempted", 75),
        ([{"ExitCode": 137, "OOMKilled": True}, {"ExitCode": 1}], None, False, "failed", 1),
        ([{"Status": "running"}, {}], {"code": None, "step": 7}, False, "running", 0),
        ([{"Status": "running"}, {"ExitCode": 137}], None, False, "restarting", 0),
        ([{"Status": "running"}, {"Status": "paused"}], None, False, "running", 0),
        ([{"Status": "created"}, {"Status": "created"}], None, False, "pending", 0),
        ([{"Status": "created", "Error": "no such device"}, {"Status": "created"}], None, False, "failed", 1),
    ],
)
def test_what_containers_mean(nodes: list[dict[str, Any]], said: Any, cancelled: bool, state: str, code: int) -> None:
    found = explain([container(**node) for node in nodes], spec_of(), said, cancelled)
    assert (found.state, found.code) == (state, code), found
    if any(node.get("OOMKilled") for node in nodes):
        assert "OOMKilled" in found.reason


@pytest.mark.parametrize("client_is", ["told", pytest.param("real", marks=pytest.mark.containers)])
def test_an_engine_that_is_not_there_is_one_line(
    client_is: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = f"unix://{tmp_path}/none.sock"
    monkeypatch.setenv("DOCKER_HOST", where)
    if client_is == "told":  # what Docker's own client says
        says = f"echo 'Cannot connect to the Docker daemon at {where}. Is the docker daemon running?' >&2; exit 1"
        program(tmp_path, says, monkeypatch)
    with pytest.raises(UserError, match="no container engine answers at unix://") as caught:
        client.docker("ps")
    assert "\n" not in str(caught.value)
    (only,) = compose_doctor.check(None)
    assert only.result == "missing"


def test_a_client_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="docker is not installed"):
        client.docker("ps")


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script into the place of `docker`."""
    (folder / "docker").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    "said",
    [
        "error during connect: Get http://x/v1.45/containers/json: EOF",
        "request returned Service Unavailable for API route and version http://x/v1.45/containers/json, check if the server …",
        "unexpected EOF",
        "Error response from daemon: context deadline exceeded",
    ],
)
def test_an_engine_that_gives_no_answer_says_nothing_about_a_job(
    said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path, f"echo '{said}' >&2; exit 1", monkeypatch)
    for words in (("status", "compose", "mine"), ("cancel", "compose", "mine"), ("list", "compose")):
        done = lockstep(tmp_path, *words)
        assert done.returncode == 69 and "no container engine answers" in done.stderr, (words, done)


def test_followed_logs_end_with_whatever_error_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program `docker` that says what nobody expects: not a refusal of ours, and not a wait without end."""
    program(tmp_path, 'case $1 in ps) echo c0ffee;; inspect) echo "{not json";; esac', monkeypatch)
    ended: Queue[BaseException | None] = Queue()

    def read() -> None:
        try:
            list(ComposeBackend(interval=0.01)._lines("small", {"c0ffee": "", "decaf": ""}, None, follow=True))
            ended.put(None)
        except Exception as error:
            ended.put(error)

    threading.Thread(target=read, daemon=True).start()
    assert isinstance(ended.get(timeout=30), json.JSONDecodeError)


@pytest.mark.containers
@pytest.mark.parametrize("name", [*SPECS, "docker/compose.yaml"])
def test_docker_reads_it(engine: str, name: str, tmp_path: Path) -> None:  # noqa: F811
    """Compose's own parser and schema take the file, and what it understood is what was meant."""
    file = ROOT / name if name.endswith(".yaml") else GOLDEN / f"{name}.yaml"
    words = ["docker", "compose", "-f", str(file), "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "WANDB_API_KEY": "w"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if name in SPECS:
        spec = JobSpec.of(SPECS[name])
        node = found["services"]["node-0"]
        assert node["mem_limit"] == str(compose.render(spec)["services"]["node-0"]["mem_limit"])
        assert json.loads(node["labels"]["lockstep/spec"].replace("$$", "$")) == spec.record()
    else:
        assert all(service["read_only"] and service["cap_drop"] == ["ALL"] for service in found["services"].values())


@pytest.mark.containers
def test_doctor(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    spec = spec_of(image="lockstep-test:nowhere", memory="900Gi", cpus=512, gpus=8, secrets={"TOKEN_OF_TEST": {"secret": "a", "key": "b"}},
                   volumes=[{"claim": "lockstep-test-none", "path": "/runs"}])  # fmt: skip
    found = {item.name: item for item in compose_doctor.check(spec)}
    assert found["engine"].result == found["compose"].result == found["limits"].result == "ok"
    for name in ("memory", "cpus of a node", "secret"):
        assert found[name].result == "missing", found[name]
    assert found["image"].result == "warning" and "will be created" in found["volume"].detail
    monkeypatch.setenv("TOKEN_OF_TEST", "x")
    found = {item.name: item for item in compose_doctor.check(copy.deepcopy(spec_of(memory="1Mi", cpus=1)))}
    assert found["memory"].result == "ok"


def test_several_nodes_get_a_secret_that_stands_in_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it the launchers know each other; a node that is brought back gets the one of those that are there."""
    sent: list[tuple[str, str]] = []

    def up(name: str, file: str, *words: str, env: dict[str, str]) -> str:
        sent.append((file, env["LOCKSTEP_SECRET"]))
        return ""

    monkeypatch.delenv("LOCKSTEP_SECRET", raising=False)
    monkeypatch.setattr(client, "compose", up)
    monkeypatch.setattr(client, "docker", lambda *words: "")
    backend, spec = ComposeBackend(), spec_of(nodes=2)
    backend._up(spec)
    backend._up(spec)
    backend._up(spec, [{"Config": {"Env": ["A=1", f"LOCKSTEP_SECRET={sent[0][1]}"]}}])
    monkeypatch.setenv("LOCKSTEP_SECRET", "the user's")
    backend._up(spec)
    secrets = [secret for _, secret in sent]
    assert len(secrets[0]) == 64 and secrets[1] != secrets[0] == secrets[2] and secrets[3] == "the user's"
    assert not any(secret in file for file, secret in sent)
    nodes = yaml.safe_load(sent[0][0])["services"].values()
    assert [node["environment"]["LOCKSTEP_SECRET"] for node in nodes] == [None, None]
    (alone,) = compose.render(spec_of(nodes=1))["services"].values()
    assert "LOCKSTEP_SECRET" not in alone["environment"]
