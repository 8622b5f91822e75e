"""A training that is submitted: it ends once, goes on where it was cut off, starts over when told, beside other runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.jobs.local.backend import LocalBackend
from lockstep.jobs.local.processes import living
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError
from tests.events import events
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, poll, run

BOUND = 90


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBackend]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    found = LocalBackend()
    yield found
    for row in found.list():
        found.cancel(row.name)


def _overrides(tmp_path: Path) -> dict[str, Any]:
    return {
        "data.root": str(tmp_path / "data"), "data.source": "synthetic", "data.options": {"n": 96, "n_test": 8, "size": 8},
        "model": "tests.nets:Dying", "model_options": {}, "global_batch_size": 12, "epochs": 2, "checkpoint.every_steps": 2,
        "augment.crop": 1, "schedule": [],
    }  # fmt: skip


def _training(tmp_path: Path, ranks: int) -> JobSpec:
    """It stands still at its sixth step until the file `held` goes."""
    held = tmp_path / "held"
    held.touch()
    env = {"LOCKSTEP_TEST_FATE": "0:6:WAIT", "LOCKSTEP_TEST_HELD": str(held)}
    return JobSpec(
        name="held",
        recipe="smoke",
        overrides=_overrides(tmp_path),
        ranks_per_node=ranks,
        max_restarts=0,
        grace_seconds=30,
        env=env,
    )


@pytest.mark.parametrize(
    ("killed", "ranks"),
    [(["running"], 2), (["supervisor"], 1), (["supervisor", "running"], 1)],
    ids=["running", "supervisor", "supervisor and running"],
)
def test_a_job_whose_launcher_is_killed_ends_once_and_when_no_rank_lives(
    backend: LocalBackend, tmp_path: Path, killed: list[str], ranks: int
) -> None:
    """Its ranks save. Until then it runs; then it is preempted, and stays so; submitted again, it goes on."""
    spec = _training(tmp_path, ranks)
    backend.submit(spec)
    folder, run = backend.folder / "held", tmp_path / "runs/jobs/held"
    poll((run / "checkpoints/step-00000004").exists, BOUND, "a checkpoint")
    job = json.loads((folder / "job.json").read_text())["job"]
    states = set()
    for name in killed:
        os.kill(json.loads((folder / f"{name}.json").read_text())["pid"], 9)
        states.add(backend.status("held").state)
    if killed == ["supervisor"]:  # the launcher does not know
        assert backend.status("held").state == "running"
        os.kill(json.loads((folder / "running.json").read_text())["pid"], 15)
    (tmp_path / "held").unlink()
    deadline = time.monotonic() + BOUND
    while time.monotonic() < deadline:
        said = backend.status("held").state
        if not living(job):
            break
        states.add(said)  # a rank lived on
        time.sleep(0.01)
    found = backend.wait("held", BOUND)
    assert states == {"running"} and (found.state, found.code) == ("preempted", 75), (states, found)
    (run / "status.json").write_text(json.dumps({"code": 0, "reason": "x", "step": 9, "attempt": 9, "job": "another"}))
    assert backend.status("held") == found
    assert backend.submit(spec).created
    assert backend.wait("held", BOUND).state == "succeeded"
    assert "Resuming at step" in "".join(backend.logs("held")) or events(run, "resumed")


def test_cancelled_submitted_again_and_started_over(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job goes on after a cancel, from whatever folder; with another word of `fresh` it starts over, once."""
    spec, run = _training(tmp_path, ranks=1), tmp_path / "runs/jobs/held"
    backend.submit(spec)
    poll((run / "checkpoints/step-00000004").exists, BOUND, "a checkpoint")
    threading.Timer(1, (tmp_path / "held").unlink).start()
    assert backend.cancel("held").state == "cancelled"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert backend.submit(spec).created and backend.wait("held", BOUND).state == "succeeded"
    assert events(run, "resumed") and not (elsewhere / "runs").exists()
    with pytest.raises(UserError, match="has already finished"):
        backend.submit(spec)
    again = spec.model_copy(update={"fresh": "second", "env": {}})
    backend.submit(again, "replace")
    assert backend.wait("held", BOUND).state == "succeeded"
    assert not events(elsewhere / "runs/jobs/held", "resumed")
    again = spec.model_copy(update={"fresh": "third", "env": {}, "run_dir": str(run)})
    backend.submit(again, "replace")
    assert backend.wait("held", BOUND).state == "succeeded"
    assert run.with_name("held.old-1").exists() and not events(run, "resumed")
    kept = (run / "events.jsonl").read_text()
    backend.submit(again, "replace")  # the same word: a start of the same run
    assert backend.wait("held", BOUND).state == "succeeded" and (run / "events.jsonl").read_text().startswith(kept)


def test_a_submitted_job_has_a_directory_of_its_own(backend: LocalBackend, tmp_path: Path) -> None:
    """A run of the recipe first, then the same one submitted: it said "complete", and had trained nothing.

    Under any umask, nobody but owner and group may change what either writes.
    """
    del backend  # its folder, and the end of what is left
    values = _overrides(tmp_path) | {"epochs": 1}
    words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()]
    before = os.umask(0)
    try:
        # A forked process would have the umask of its server.
        done = run(
            [PYTHON, "-m", "lockstep.training", "run", "smoke", "--set", *words],
            clean_env(PYTHONPATH=str(ROOT)),
            cwd=tmp_path,
        )
        assert done.code == 0, done
        sets = [word for text in words for word in ("--set", f"overrides.{text}")]
        told = lockstep(tmp_path, "submit", "local", "--recipe", "smoke", *sets, "--wait", "100")
        assert told.returncode == 0 and len(events(tmp_path / "runs/jobs/smoke", "epoch")) == 1, told
        told = lockstep(
            tmp_path,
            "submit",
            "local",
            "--recipe",
            "smoke",
            *sets,
            "--fresh",
            "--run-dir",
            "runs/smoke",
            "--wait",
            "100",
        )
        assert told.returncode == 0 and (tmp_path / "runs/smoke.old-1").exists(), told
    finally:
        os.umask(before)
    written = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    assert len(written) > 20 and [path for path in written if path.stat().st_mode & 0o002] == []
