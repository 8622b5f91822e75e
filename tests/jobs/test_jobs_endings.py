"""A submitted training ends once, resumes where it was cut off, and starts over on request, next to other runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
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


def _submitted(backend: Any, tmp_path: Path, ranks: int, fate: str = "WAIT") -> JobSpec:
    """It stands still at its sixth step, with a checkpoint, until the file `held` goes; with HOLD until a signal comes."""
    held, once = tmp_path / "held", tmp_path / "held-once"
    if fate == "WAIT":
        held.touch()
    env = {"LOCKSTEP_TEST_FATE": f"0:6:{fate}", "LOCKSTEP_TEST_HELD": str(held), "LOCKSTEP_TEST_ONCE": str(once)}
    limits = {"ranks_per_node": ranks, "max_restarts": 0, "grace_seconds": 30}
    spec = JobSpec(name="held", recipe="smoke", overrides=_overrides(tmp_path), env=env, **limits)
    backend.submit(spec)
    poll((tmp_path / "runs/jobs/held/checkpoints/step-00000004").exists, BOUND, "a checkpoint")
    poll(lambda: once.exists() and held.exists(), BOUND, "a run that stands still")  # a signal before would find none
    return spec


def _lives(job: str) -> bool:
    """Whether a process names the job in its environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"LOCKSTEP_JOB={job}".encode() in file.read_bytes().split(b"\0"):
                return True
    return False


def test_a_job_whose_launcher_is_killed_ends_once_and_when_no_rank_lives(backend: Any, tmp_path: Path) -> None:
    """With their launcher its ranks end at once."""
    spec = _submitted(backend, tmp_path, 2)
    folder, run_dir, states = backend.folder / "held", tmp_path / "runs/jobs/held", set()
    job = json.loads((folder / "job.json").read_text())["job"]
    os.kill(json.loads((folder / "running.json").read_text())["pid"], 9)
    states.add(backend.status("held").state)
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        said = backend.status("held").state
        if not _lives(job):
            break
        states.add(said)  # a rank lived on
        time.sleep(0.01)
    found = backend.wait("held", BOUND)
    assert states == {"running"} and (found.state, found.code) == ("failed", 1), (states, found)
    said = {"code": 0, "reason": "x", "step": 9, "attempt": 9, "job": "another"}
    (run_dir / "status.json").write_text(json.dumps(said))
    assert backend.status("held") == dataclasses.replace(found, goodput=None, slow_rank=None)
    (tmp_path / "held").unlink(missing_ok=True)
    assert backend.submit(spec, "replace").created
    assert (found := backend.wait("held", BOUND)).state == "succeeded", (found, "\n".join(backend.logs("held")))
    assert events(run_dir, "resumed")


def test_cancelled_submitted_again_and_started_over(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled job resumes when it is submitted again, from any folder. A new word for `fresh` starts the run over; the same word a
    second time does not."""
    spec = _submitted(backend, tmp_path, 1, "HOLD")
    run_dir, elsewhere = tmp_path / "runs/jobs/held", tmp_path / "elsewhere"
    assert backend.cancel("held").state == "cancelled"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert backend.submit(spec).created
    assert (found := backend.wait("held", BOUND)).state == "succeeded", (found, "\n".join(backend.logs("held")))
    assert events(run_dir, "resumed") and not (elsewhere / "runs").exists()
    with pytest.raises(UserError, match="has already finished"):
        backend.submit(spec)
    again = spec.model_copy(update={"fresh": "second", "env": {}, "run_dir": str(run_dir)})
    for start in (1, 2):  # the same word again: a start of the same run
        kept = (run_dir / "events.jsonl").read_text() if start == 2 else ""
        backend.submit(again, "replace")
        assert backend.wait("held", BOUND).state == "succeeded"
        assert run_dir.with_name("held.old-1").exists() and not events(run_dir, "resumed")
        assert (run_dir / "events.jsonl").read_text().startswith(kept)


def test_a_submitted_job_has_its_own_directory(backend: Any, tmp_path: Path) -> None:
    """A run of the recipe by hand does not make the submitted job complete: each has its own directory. Under any umask, no other user
    may write into either."""
    values = _overrides(tmp_path) | {"epochs": 1}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    before = os.umask(0)
    try:
        # A forked process would have the umask of its server.
        done = run([PYTHON, "-m", "lockstep.training", "run", "smoke", "--set", *words], clean_env(), cwd=tmp_path)
        assert done.code == 0, done
        overrides = [f"overrides.{text}" for text in words]
        submit = ["submit", "local", "--recipe", "smoke", "--wait", "100", *(f"--set={one}" for one in overrides)]
        told = lockstep(tmp_path, *submit)
        assert told.returncode == 0 and len(events(tmp_path / "runs/jobs/smoke", "epoch")) == 1, told
        told = lockstep(tmp_path, *submit, "--fresh", "--run-dir", "runs/smoke")
        assert told.returncode == 0 and (tmp_path / "runs/smoke.old-1").exists(), told
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    assert len(written) > 20 and [path for path in written if path.stat().st_mode & 0o002] == []
