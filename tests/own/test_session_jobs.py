"""A `command:` job and the Session of its program: run directory, settings, a start over, a sweep, the end by a signal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.jobs import sweep
from lockstep.jobs.command import handed
from lockstep.jobs.job import Job
from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.config.own import own_settings
from lockstep.training.contract import ENV_SESSION, UserError
from lockstep.training.launch.handed import Handed
from tests.events import events
from tests.own.job import SCRIPT, OwnJob, assert_same
from tests.processes import PYTHON, ROOT, clean_env, run

BOUND = 120
TINY = """
import sys, torch
from lockstep import Session
with Session("elsewhere", config={"lr": 0.1, "model": {"width": 4}}) as run:
    model = run.replicate(torch.nn.Linear(run.config["model"]["width"], 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=run.config["lr"]))
    run.log(lr=run.config["lr"], width=run.config["model"]["width"])
    for _ in run.epochs(1):
        for x in run.iterate([torch.ones(4, run.config["model"]["width"])] * 3):
            run.step(model(x).square().mean(), samples=4)
"""


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    for name, value in {
        "PYTHONPATH": str(ROOT),
        "LOCKSTEP_HOME": str(tmp_path / "home"),
        "LOCKSTEP_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    found = LocalBackend()
    yield found
    for row in found.list():
        found.cancel(row.name)


def spec(**more: Any) -> JobSpec:
    return JobSpec.of({"name": "own", "command": ["python", "tiny.py"], "ranks_per_node": 2, "max_restarts": 0, **more})


def finished(backend: LocalBackend, name: str) -> str:
    """What a job that has succeeded said."""
    found = backend.wait(name, BOUND)
    said = "".join(f"{line}\n" for line in backend.logs(name))
    assert found.state == "succeeded", (found, said)
    return said


def test_a_job_keeps_the_run_where_it_says_and_its_overrides_are_stronger(local: LocalBackend, tmp_path: Path) -> None:
    job = spec(grace_seconds=17, overrides={"checkpoint.every_steps": 2, "config.lr": 0.25, "config.model.width": 3})
    local.submit(job)
    said = finished(local, "own")
    run_dir = tmp_path / "runs/jobs/own"
    assert not (tmp_path / "elsewhere").exists()
    written = yaml.safe_load((run_dir / "run.yaml").read_text())["config"]
    assert written["config"] == {"lr": 0.25, "model": {"width": 3}} and written["preempt"]["grace_seconds"] == 17
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
    assert json.loads((run_dir / "status.json").read_text())["job"], "it is this job's run"
    assert local.summary("own")["logged"] == {"lr": 0.25, "width": 3.0}
    events = [json.loads(line.split("] ", 1)[1])["event"] for line in said.splitlines() if '{"event"' in line]
    assert "epoch" in events and "log" in events, "a job's log is of JSON lines"


def test_submitted_with_fresh_the_run_starts_over_once(local: LocalBackend, tmp_path: Path) -> None:
    local.submit(spec(ranks_per_node=1))
    finished(local, "own")
    local.submit(spec(ranks_per_node=1, fresh="again"), "replace")
    finished(local, "own")
    assert len(events(tmp_path / "runs/jobs/own", "epoch")) == 1, "the run of before lies beside it"
    moved = [path for path in (tmp_path / "runs/jobs").iterdir() if path.name.startswith("own.")]
    assert len(moved) == 1 and len(events(moved[0], "epoch")) == 1
    local.submit(
        spec(ranks_per_node=1, fresh="again", max_restarts=1), "replace"
    )  # the same word: the run goes on, and is complete
    finished(local, "own")
    assert (
        len(events(tmp_path / "runs/jobs/own", "epoch")) == 1 and len(list((tmp_path / "runs/jobs").glob("own.*"))) == 1
    )


def test_a_sweep_over_the_scripts_own_settings(local: LocalBackend) -> None:
    specs = sweep.expand(spec(ranks_per_node=1), sweep.parse(["config.lr=0.5,2"]))
    jobs = sweep.submit(spec(), specs, "local")
    assert [job.wait(BOUND).state for job in jobs] == ["succeeded", "succeeded"]
    assert [Job(job.name, local).summary()["logged"]["lr"] for job in jobs] == [0.5, 2.0]


def test_a_job_that_is_cancelled_has_saved_and_goes_on_in_the_same_bits(local: LocalBackend, tmp_path: Path) -> None:
    calm = OwnJob(tmp_path / "calm", 2, "batches", "sync.name=flat")
    assert calm.go().code == 0
    disturbed = OwnJob(tmp_path / "runs/jobs/own", 2, "batches", "sync.name=flat")
    command = ["python", SCRIPT, "elsewhere", "batches"]
    variables = {"LOCKSTEP_TEST_FATE": "1:13:TERM", "LOCKSTEP_TEST_ONCE": str(tmp_path / "once")}
    job = spec(
        command=command,
        env=variables,
        overrides={"checkpoint.every_steps": 2, "checkpoint.keep": 50, "sync.name": "flat"},
    )
    local.submit(job)
    assert (found := local.wait("own", BOUND)).code == 75 and found.state == "preempted", found
    local.submit(job)
    finished(local, "own")
    assert_same(disturbed, calm)


def test_what_a_program_without_a_session_does_not_see_is_said(local: LocalBackend) -> None:
    local.submit(spec(command=["python", "-c", "pass"], overrides={"seed": 3}, ranks_per_node=1))
    said = finished(local, "own")
    assert "the program opened no Session in" in said and "warning" in said
    local.submit(spec(command=["python", "-c", "pass"], ranks_per_node=1), "replace")
    assert "Session" not in finished(local, "own"), "where nothing was asked for nothing is missing"


def test_options_of_lockstep_run_reach_the_session(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(TINY)
    lockstep = [str(Path(PYTHON).parent / "lockstep"), "run", "--ranks", "1", "--run-dir", "here"]
    options = ["--set", "config.lr=0.5", "seed=4", "--fresh", "--log-format", "json", "--", "python", "tiny.py"]
    env = clean_env(PYTHONPATH=str(ROOT), LOCKSTEP_THREADS="1")
    for _ in range(2):
        done = run([*lockstep, *options], env, 90, cwd=tmp_path)
        assert done.code == 0, done.output
    assert not (tmp_path / "elsewhere").exists() and len(list(tmp_path.glob("here.*"))) == 1
    assert yaml.safe_load((tmp_path / "here/run.yaml").read_text())["config"]["seed"] == 4
    refused = run([*lockstep, "--set", "sede=4", "--", "python", "tiny.py"], env, 90, cwd=tmp_path)
    assert refused.code == 2 and "unknown setting 'sede'; did you mean 'seed'?" in refused.output


def test_a_mistake_is_found_before_the_job_is_sent() -> None:
    for overrides, words in (
        ({"optim.lr": 1}, "unknown setting 'optim.lr'"), ({"checkpoint.every_steps": "often"}, "checkpoint.every_steps"),
        ({"sync.name": "flatt"}, "flat"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            spec(overrides=overrides)
    assert spec(overrides={"config.anything": [1]}).overrides  # which settings the script has is known to it alone


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("config.rl=1", r"no setting 'rl' in config; did you mean 'lr'"),
        ("config.lr=fast", "expected a number like the script's 0.1, got 'fast'"),
        ("config.flag=1", "expected true or false like the script's True, got 1"),
        ("config.deep=1", "no setting 'deep' in config"),
        ("config=1", "no setting 'config' in config"),
    ],
)
def test_a_setting_that_the_script_does_not_have_is_refused(word: str, told: str) -> None:
    config = {"lr": 0.1, "flag": True, "deep": {"er": None}}
    with pytest.raises(UserError, match=told):
        own_settings("train", config, {}, [word])
    assert own_settings("train", config, {}, ["config.lr=2", "config.deep.er=x"]).config["lr"] == 2.0
    assert config["deep"] == {"er": None}, "the script's own values stay as they are"


def test_what_is_handed_over_is_taken_once_and_read_with_care() -> None:
    job = spec(gpus=2, ranks_per_node=2, fresh="w", overrides={"seed": 1})
    env = {ENV_SESSION: handed(job, "/runs/own")}
    taken = Handed.take(env)
    settings = ("log.format=json", "seed=1", "preempt.grace_seconds=60", "device=cuda")
    assert taken == Handed("/runs/own", settings, "w", expected=True) and env == {}
    assert Handed.take(env) == Handed()
    for text in ("", "[]", "nonsense", '{"run_dir": 3}', '{"settings": [1]}', '{"more": 1}', '{"settings": 5}'):
        with pytest.raises(UserError, match=ENV_SESSION):
            Handed.of(text)
