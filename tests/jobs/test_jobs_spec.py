"""JobSpec: strict quantities, errors with the nearest name, one hash for one job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.jobs.helpers import lockstep
from tests.product import JobSpec, UserError, words_of_rank

BASE: dict[str, Any] = {"name": "a", "recipe": "smoke"}


@pytest.mark.promise("bad-input")
@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("nodse: 2", "did you mean 'nodes'"), ("recipe: smok", "line 3: key 'recipe' twice"), ("overrides:\n  lrr: 1", "did you mean 'lr'"),
        ("overrides: {metrics.port: 9500}", "set metrics_port of the job"),
        ("overrides: {metrics.address: any}", "LOCKSTEP_METRICS_ADDRESS in its env"),
        ("k8s:\n  quue: x", "did you mean 'queue'"),
        ("kubernetes: {}", "did you mean 'k8s'"), ("memory: 64", "must be a size such as 512Mi"), ("memory: 32GB", "got '32GB'"),
        ("nodes: x\ngpus: y", "nodes must be a valid integer, got 'x'; gpus"), ("env: {A: 1}", "env.A"),
        ("volumes:\n  - claim: x\n    pth: /a", "did you mean 'path'"), ("name: b", "line 3: key 'name' twice"),
        ("nodes: two", "nodes"), ("nodez:", "did you mean 'nodes'"), ("env:\n  A:", "env.A"), ("volumes:", "volumes must be a valid list"),
        ("overrides: {epochz: null}", "did you mean 'epochs'"), ("run_dir: /", "run_dir"), ("command: [a]", "exactly one"),
        ("command: python a.py 3", "command must be a valid list"),
        ("- a", ""), ("env: &x {}\noverrides: *x", "aliases"),
    ],
)  # fmt: skip
def test_mistakes_name_the_setting_and_the_nearest_name(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: a\nrecipe: smoke\n{text}\n")
    with pytest.raises(UserError) as error:
        JobSpec.load(path)
    message = str(error.value)
    assert fragment in message and "\n" not in message and str(path) in message, message


def test_null_in_a_file_is_a_value(tmp_path: Path) -> None:
    """As with --set: null removes a profile's value. Without a profile it removes a default or a rendered field."""
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\nrecipe: smoke\nslurm: {account: null, qos: q}\nenv: {A: null, B: b}\n"
        "k8s: {run_as_user: null, patch: {spec: {runPolicy: {activeDeadlineSeconds: null}}}}\n"
    )
    spec = JobSpec.load(path, below={"slurm": {"account": "ours", "partition": "p"}, "env": {"A": "a"}})
    assert (spec.slurm.account, spec.slurm.qos, spec.slurm.partition, spec.env) == (None, "q", "p", {"B": "b"})
    assert (spec.k8s.run_as_user, spec.k8s.patch) == (None, {"spec": {"runPolicy": {"activeDeadlineSeconds": None}}})
    path.write_text("name: a\nrecipe: smoke\ncommand: null\ncode: null\njoin_timeout:\n")
    spec = JobSpec.load(path)
    assert (spec.command, spec.code, spec.join_timeout) == (None, None, None), "code: null sent the whole folder"


def _set(folder: Path, *words: str) -> Any:
    return lockstep(folder, "render", "compose", *(f"--set={word}" for word in ("recipe=smoke", "image=a:1", *words)))


def test_set_reads_as_that_of_a_recipe(tmp_path: Path) -> None:
    """Settings have short names. Text stays as typed, other values are YAML."""
    words = ["queue=gpu", "memory=8Gi", "time_limit=2h", "nodes=2", "container=null",
             "overrides.optim.lr=1e-3", "overrides.epochs=2", 'env.A="5"', "slurm.patch.a.b=[1]"]  # fmt: skip
    done = _set(tmp_path, *words)
    assert done.returncode == 0, done
    file = yaml.safe_load(done.stdout)
    record = json.loads(file["services"]["node-0"]["labels"]["lockstep/spec"].replace("$$", "$"))
    spec = JobSpec.of({
        "name": "smoke", "recipe": "smoke", "image": "a:1", "memory": "8Gi", "time_limit": "2h", "nodes": 2, "env": {"A": "5"},
        "overrides": {"optim.lr": "1e-3", "epochs": 2},
        "k8s": {"queue": "gpu"}, "slurm": {"patch": {"a": {"b": [1]}}},
    })  # fmt: skip
    assert record == spec.record()
    for word, fragment in {
        "image_pul_policy=Never": "did you mean 'image_pull_policy'", "k8s={queue: gpu}": "'k8s'",
        "patch={}": "k8s.patch, slurm.patch, compose.patch", "nodes=[1": "--set nodes", "env=3": "env",
    }.items():  # fmt: skip
        done = _set(tmp_path, word)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and fragment in done.stderr, done


def test_live_reaches_the_launcher(tmp_path: Path) -> None:
    for words, live in ((), False), (("live=true", "overrides.sync.name=exact"), True):
        done = _set(tmp_path, *words)
        node = yaml.safe_load(done.stdout)["services"]["node-0"]
        assert ("--live" in node["command"]) == live, done


@pytest.mark.parametrize(
    "change",
    [
        {"name": "A"}, {"name": "-a"}, {"name": "a\n"}, {"name": "a" * 64}, {"name": "ä"}, {"image": "a; rm -rf /"},
        {"image": "-a"}, {"env": {"A B": "1"}}, {"env": {"A": "\x00"}}, {"env": {"A": "\x1b[2J"}}, {"env": {"A": "\ud800"}},
        {"memory": "1e9"}, {"memory": "0Gi"}, {"memory": "1Gi\n"}, {"memory": "1"}, {"time_limit": "2"}, {"time_limit": "1m1h"},
        {"time_limit": "-1h"}, {"nodes": 0}, {"nodes": True}, {"gpus": -1}, {"gpus": 2, "ranks_per_node": 3}, {"cpus": 0},
        {"cpus": float("nan")}, {"run_dir": "/runs/$(x)"}, {"volumes": [{"claim": "a", "path": "/a/../etc"}]},
        {"volumes": [{"claim": "a", "path": "a"}]}, {"command": ["a"]}, {"metrics_port": 80}, {"run_dir": "/dev/shm"},
        {"env": {"A": "1"}, "secrets": {"A": {"secret": "s", "key": "k"}}}, {"secrets": {"A": "literal"}},
        {"slurm": {"partition": "a b"}},
        {"slurm": {"account": "a\n#SBATCH --wrap=x"}}, {"k8s": {"run_as_user": 0}}, {"k8s": {"patch": {1: 2}}},
        {"k8s": {"rdma": {"rdma/a": 0}}}, {"overrides": {"epochs": "x"}},
        {"volumes": [{"claim": "a", "path": "/tmp/"}]},
        {"volumes": [{"claim": "a", "path": "/a"}, {"claim": "b", "path": "/a/"}]},
    ],
)  # fmt: skip
def test_what_would_do_harm_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        JobSpec.of({**BASE, **change})
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_yaml_flags_and_python_make_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\nrecipe: smoke\nk8s: {queue: q}\noverrides: {optim.lr: 0.1}\nenv: {B: '2', A: '1'}\n")
    by_yaml = JobSpec.load(path)
    more: dict[str, Any] = {"k8s": {"queue": "q"}, "overrides": {"optim.lr": 0.1}, "env": {"A": "1", "B": "2"}}
    assert by_yaml == JobSpec.of({**BASE, **more}) == JobSpec(**BASE, **more)
    flags = JobSpec.load(path, {"overrides.optim.lr": 0.1, "k8s.queue": "q"})
    assert flags == by_yaml and flags.hash() == by_yaml.hash() == JobSpec.of({**BASE, **more}).hash()
    assert by_yaml.hash() != JobSpec.of({**BASE, **more, "nodes": 2}).hash()
    written_out = {"nodes": 1, "k8s": {"ttl": "7d"}}
    assert JobSpec.of({**BASE, **written_out}).hash() == JobSpec.of(BASE).hash(), "a default is the same job"


def test_a_record_is_whole_and_one_of_another_version_is_refused_by_the_setting_that_is_unknown() -> None:
    spec = JobSpec.of({"name": "new", "recipe": "smoke", "gpus": 4, "k8s": {"queue": "gpu"}})
    assert JobSpec.recorded("new", spec.record()) == spec
    with pytest.raises(
        UserError, match="the record of old is .*another version of Lockstep: unknown setting 'warp_drive'"
    ):
        JobSpec.recorded("old", {**spec.record(), "warp_drive": 9})


@pytest.mark.promise("gpu-standin")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"recipe": "smoke"}, False), ({"recipe": "smoke", "gpus": 2}, True), ({"command": ["./train"], "gpus": 2}, False),
        ({"recipe": "smoke", "gpus": 2, "overrides": {"device": "auto"}}, False),
        ({"recipe": "/in/the/image.yaml", "image": "registry/x:1", "gpus": 1}, True),
    ],
)  # fmt: skip
def test_a_job_with_gpus_does_not_train_on_the_cpu_in_silence(given: dict[str, Any], expected: bool) -> None:
    """The user can override this. A `command:` gets no setting of Lockstep."""
    assert ("device=cuda" in words_of_rank(JobSpec.of({"name": "x", **given}))) == expected
