"""A `command:` job and the Session of its program: run directory, settings, a start over, a sweep, the end by a signal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.events import events, status_of, summary_of
from tests.processes import LOCKSTEP, ROOT, Result, clean_env, run
from tests.warm.gang import python

TINY = """
import sys, torch
from lockstep import Session
from tests.product import SGD
with Session("elsewhere", config={"lr": 0.1, "flag": True, "deep": {"er": None}, "model": {"width": 4}}) as run:
    model = run.replicate(torch.nn.Linear(run.config["model"]["width"], 1))
    run.optimizer(lambda parameters: SGD(parameters, lr=run.config["lr"]))
    run.log(lr=run.config["lr"], width=run.config["model"]["width"])
    for _ in run.epochs(1):
        for x in run.iterate([torch.ones(4, run.config["model"]["width"])] * 3):
            run.step(model(x).square().mean(), samples=4)
"""
Lockstep = Callable[..., Result]
pytestmark = pytest.mark.promise("local-jobs")


@pytest.fixture
def lockstep(tmp_path: Path) -> Iterator[Lockstep]:
    """`lockstep WORDS` in a folder with tiny.py; `code` is the exit code that it must have."""
    (tmp_path / "tiny.py").write_text(TINY)
    env = clean_env(PYTHONPATH=str(ROOT), LOCKSTEP_HOME=str(tmp_path / "home"), LOCKSTEP_THREADS="1")

    def call(*words: str, code: int = 0) -> Result:
        done = run([LOCKSTEP, *words], env, 300, cwd=tmp_path)
        assert done.code == code and "Traceback" not in done.output, done.output
        return done

    yield call
    if (tmp_path / "home/local/own").exists():
        run([LOCKSTEP, "cancel", "local", "own"], env, cwd=tmp_path)


def submit(lockstep: Lockstep, folder: Path, *words: str, **more: object) -> str:
    """Returns the job's output, once it has ended."""
    job = {"name": "own", "command": ["python", "tiny.py"], "ranks_per_node": 1, "max_restarts": 0, **more}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    lockstep("submit", "local", "job.yaml", "--wait", "240", *words)
    return lockstep("logs", "local", "own").output


def leave_earlier_run(run_dir: Path) -> None:
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "run.yaml").touch()


@pytest.mark.promise("fresh")
def test_a_job_keeps_the_run_where_it_says_and_starts_over_once(lockstep: Lockstep, tmp_path: Path) -> None:
    """The job's overrides win over the script's settings. The same word in `fresh` again leaves the run complete."""
    run_dir = tmp_path / "runs/jobs/own"
    leave_earlier_run(run_dir)
    overrides = {"checkpoint.every_steps": 2, "config.lr": 0.25, "config.model.width": 3}
    output = submit(lockstep, tmp_path, grace_seconds=17, overrides=overrides, fresh="again")
    assert not (tmp_path / "elsewhere").exists()
    written = yaml.safe_load((run_dir / "run.yaml").read_text())["config"]
    assert written["config"]["lr"] == 0.25 and written["config"]["model"] == {"width": 3}
    assert written["preempt"]["grace_seconds"] == 17
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000002", "step-00000003"]
    assert status_of(run_dir)["job"], "it is this job's run"
    assert summary_of(run_dir)["logged"] == {"lr": 0.25, "width": 3.0}
    printed = [json.loads(line[line.index("{") :])["event"] for line in output.splitlines() if '{"event"' in line]
    assert "epoch" in printed and "log" in printed, "a job's log is of JSON lines"
    submit(lockstep, tmp_path, "--replace", fresh="again", overrides=overrides)
    (moved,) = (path for path in (tmp_path / "runs/jobs").iterdir() if path.name.startswith("own."))
    assert (moved / "run.yaml").read_text() == "" and len(events(run_dir, "epoch")) == 1
    assert len(events(run_dir, "start")) == 2


def test_settings_that_a_program_without_a_session_does_not_see_are_reported(
    lockstep: Lockstep, tmp_path: Path
) -> None:
    output = submit(lockstep, tmp_path, command=["python", "-c", "pass"], overrides={"seed": 3})
    assert "warning" in output and "opened no Session" in output


@pytest.mark.promise("session-refuses", "bad-input")
def test_options_of_lockstep_run_reach_the_session_or_are_refused(lockstep: Lockstep, tmp_path: Path) -> None:
    leave_earlier_run(tmp_path / "here")
    options = ("--set", "config.lr=0.5", "--set", "seed=4", "--fresh")
    lockstep("run", "--ranks", "1", "--run-dir", "here", *options, "--", "python", "tiny.py")
    assert not (tmp_path / "elsewhere").exists() and len(list(tmp_path.glob("here.*"))) == 1
    assert yaml.safe_load((tmp_path / "here/run.yaml").read_text())["config"]["seed"] == 4
    for overrides in ({"optim.lr": 1}, {"checkpoint.every_steps": "often"}, {"sync.name": "flatt"}):
        (tmp_path / "job.yaml").write_text(
            yaml.safe_dump({"name": "own", "command": ["python", "tiny.py"], "overrides": overrides})
        )
        refused = lockstep("submit", "local", "job.yaml", code=2)  # before the job is sent
        assert next(iter(overrides)) in refused.output, refused.output


HANDED_OVER = {
    "": "LOCKSTEP_SESSION", "nonsense": "LOCKSTEP_SESSION", '{"run_dir": 3}': "LOCKSTEP_SESSION", '{"more": 1}': "LOCKSTEP_SESSION",
    '{"settings": ["sede=4"]}': "'seed'",
    '{"settings": ["config.rl=1"]}': "'lr'", '{"settings": ["config.flag=1"]}': "true", '{"settings": ["config.deep=1"]}': "'deep'",
}  # fmt: skip
"""Text that a launcher may put into the variable → name in the error."""


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("text", HANDED_OVER)
def test_what_is_handed_over_is_read_with_care(text: str, tmp_path: Path) -> None:
    done = python("-c", TINY, env=clean_env(LOCKSTEP_SESSION=text, PYTHONPATH=str(ROOT)), cwd=tmp_path)
    assert done.code == 2 and HANDED_OVER[text] in done.output and "Traceback" not in done.output, done.output
