"""A submitted training ends once, resumes where it was cut off, and starts over on request, next to other runs."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.events import events
from tests.jobs.conftest import launched
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, clean_env, poll, run
from tests.product import JobSpec, UserError

pytestmark = [pytest.mark.promise("local-jobs"), launched]
BOUND = 90


def _overrides(tmp_path: Path) -> dict[str, Any]:
    return {
        "data.root": str(tmp_path / "data"), "data.source": "synthetic", "data.options": {"n": 96, "n_test": 8, "size": 8},
        "model": "tests.nets:Dying", "model_options": {}, "global_batch_size": 12, "epochs": 2, "checkpoint.every_steps": 2,
        "augment.crop": 1, "schedule": [],
    }  # fmt: skip


def _submit_held_job(backend: Any, tmp_path: Path, ranks: int, fate: str = "WAIT") -> JobSpec:
    """Submits a job that has a checkpoint and waits at its sixth step for the end of the file `held`; with HOLD, for a signal."""
    held_file, once_file = tmp_path / "held", tmp_path / "held-once"
    if fate == "WAIT":
        held_file.touch()
    env = {
        "LOCKSTEP_TEST_FATE": f"0:6:{fate}",
        "LOCKSTEP_TEST_HELD": str(held_file),
        "LOCKSTEP_TEST_ONCE": str(once_file),
    }
    limits = {"ranks_per_node": ranks, "max_restarts": 0, "grace_seconds": 30}
    spec = JobSpec(name="held", recipe="smoke", overrides=_overrides(tmp_path), env=env, **limits)
    backend.submit(spec)
    poll((tmp_path / "runs/jobs/held/checkpoints/step-00000004").exists, BOUND, "a checkpoint")
    # An earlier signal would meet no handler.
    poll(lambda: once_file.exists() and held_file.exists(), BOUND, "a run that stands still")
    return spec


def _lives(job: str) -> bool:
    """Whether a process names the job in its environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"LOCKSTEP_JOB={job}".encode() in file.read_bytes().split(b"\0"):
                return True
    return False


def test_a_job_with_a_killed_launcher_runs_until_its_last_rank_is_gone(backend: Any, tmp_path: Path) -> None:
    """The launcher is killed. The job is `running` as long as a rank lives, and `failed` afterwards."""
    _submit_held_job(backend, tmp_path, 2)
    folder, states = backend.folder / "held", set()
    job = json.loads((folder / "job.json").read_text())["job"]
    os.kill(json.loads((folder / "running.json").read_text())["pid"], 9)

    def ranks_ended() -> bool:
        state = backend.status("held").state
        lives = _lives(job)
        states.update([state] if lives else ())  # a rank still lived
        return not lives

    poll(ranks_ended, BOUND, "the end of the ranks")
    status = backend.wait("held", BOUND)
    assert states <= {"running"} and (status.state, status.code) == ("failed", 1), (states, status)


def test_a_cancelled_job_resumes_and_a_new_word_for_fresh_starts_it_over(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled job resumes when it is submitted again, from any folder. A new value of `fresh` starts the run over, a repeated
    value does not."""
    spec = _submit_held_job(backend, tmp_path, 1, "HOLD")
    run_dir, elsewhere = tmp_path / "runs/jobs/held", tmp_path / "elsewhere"
    assert backend.cancel("held").state == "cancelled"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert backend.submit(spec).created
    assert (status := backend.wait("held", BOUND)).state == "succeeded", (status, "\n".join(backend.logs("held")))
    assert events(run_dir, "resumed") and not (elsewhere / "runs").exists()
    with pytest.raises(UserError, match="has already finished"):
        backend.submit(spec)
    again = spec.model_copy(update={"fresh": "second", "env": {}, "run_dir": str(run_dir)})
    for start in (1, 2):  # the same word again: a start of the same run
        earlier_events = (run_dir / "events.jsonl").read_text() if start == 2 else ""
        backend.submit(again, "replace")
        assert backend.wait("held", BOUND).state == "succeeded"
        assert run_dir.with_name("held.old-1").exists() and not events(run_dir, "resumed")
        assert (run_dir / "events.jsonl").read_text().startswith(earlier_events)


def test_a_submitted_job_has_its_own_directory(backend: Any, tmp_path: Path) -> None:
    """A manual run of the recipe does not complete the submitted job: each has a separate directory. Under any umask, no other user
    may write into either."""
    values = _overrides(tmp_path) | {"epochs": 1}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    before = os.umask(0)
    try:
        # A forked process would have the umask of its server.
        done = run([PYTHON, "-m", "lockstep.training", "run", "smoke", "--set", *words], clean_env(), cwd=tmp_path)
        assert done.code == 0, done
        overrides = [f"overrides.{text}" for text in words]
        submit = ["submit", "local", "--recipe", "smoke", "--wait", "100", *(f"--set={text}" for text in overrides)]
        process = lockstep(tmp_path, *submit)
        assert process.returncode == 0 and len(events(tmp_path / "runs/jobs/smoke", "epoch")) == 1, process
        process = lockstep(tmp_path, *submit, "--fresh", "--run-dir", "runs/smoke")
        assert process.returncode == 0 and (tmp_path / "runs/smoke.old-1").exists(), process
    finally:
        os.umask(before)
    paths = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    assert len(paths) > 20 and [path for path in paths if path.stat().st_mode & 0o002] == []
