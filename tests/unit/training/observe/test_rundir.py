"""The run directory: whose it is, who may use it, and what is recorded in it."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import filelock
import pytest

from lockstep.training.observe import rundir
from lockstep.training.observe.rundir import RunDirectory
from lockstep.training.parallel.world import World
from tests import product
from tests.processes import poll
from tests.product import UserError


def _open(path: Path, *words: str, fresh: bool = False) -> RunDirectory:
    return RunDirectory.open(path, product.recipe("smoke", *words), fresh=fresh)


def _describe(run: RunDirectory) -> None:
    run.describe(product.recipe(), World(), 128, {"name": "digits", "checksum": "0"}, "1 thread")


@pytest.mark.promise("fresh")
def test_another_config_is_refused_and_nothing_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    path = tmp_path / "run"
    run = _open(path)
    with pytest.raises(UserError, match="in use"):
        _open(path)
    _describe(run)
    run.status(75, "preempted", 3)
    run.close()
    assert b"hunter2" not in (path / "run.yaml").read_bytes()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match=r"optim.lr: 0.002 → 0.1.*--fresh"):
        _open(path, "lr=0.1")
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    again = _open(path, "epochs=99")
    assert again.attempt == 2 and again.saved is not None and again.saved["global_batch_size"] == 128
    again.close()
    fresh = _open(path, "lr=0.1", fresh=True)
    assert fresh.attempt == 1 and (tmp_path / "run.old-1/run.yaml").exists()
    fresh.close()


def test_a_restart_waits_longer_for_the_lock_of_the_node_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(rundir, "LOCK_SECONDS_AGAIN", 20)
    first = _open(tmp_path / "run")
    monkeypatch.setenv("LOCKSTEP_RESTARTS", "1")
    attempts: list[int] = []

    def again() -> None:
        second = _open(tmp_path / "run")
        attempts.append(second.attempt)
        second.close()

    waiting = threading.Thread(target=again)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "longer than a first start waits"
    first.close()
    poll(lambda: attempts == [1], 20, "the second attempt")
    waiting.join(20)


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("damage", ["", "config: 3", "config: {}\nglobal_batch_size: x", "\x00", "- 1"])
def test_a_damaged_run_yaml(tmp_path: Path, damage: str) -> None:
    (tmp_path / "run.yaml").write_text(damage)
    with pytest.raises(UserError, match=r"run\.yaml"):
        rundir.read_run(tmp_path)


def test_events_survive_a_disk_that_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _open(tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").mkdir()
    run.event("step", step=1)
    run.event("step", step=2)
    run.close()
    assert capsys.readouterr().err.count("the run continues") == 1


def test_the_revision_is_of_this_source_and_not_of_the_project_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed into a project's .venv, the nearest history is the project's."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    monkeypatch.delenv("LOCKSTEP_REVISION", raising=False)
    for place, found in ((".venv/lib/training/observe", ""), ("training/observe", git("rev-parse", "HEAD").strip())):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.setattr(rundir, "__file__", str(tmp_path / place / "rundir.py"))
        assert rundir.git_revision() == found


def test_a_lock_is_of_the_directory_that_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start with `fresh` renames the directory at the moment at which its lock is taken."""
    path, aside = tmp_path / "run", tmp_path / "run.old-1"

    class Renamed(filelock.FileLock):
        def acquire(self, *args: Any, **more: Any) -> Any:
            taken = super().acquire(*args, **more)
            if not aside.exists():
                path.rename(aside)
            return taken

    with monkeypatch.context() as patched:
        patched.setattr(filelock, "FileLock", Renamed)
        lock = rundir._locked(path, 10.0)
    with pytest.raises(filelock.Timeout):
        filelock.FileLock(path / ".lock", timeout=0).acquire()
    filelock.FileLock(aside / ".lock", timeout=0).acquire().lock.release()
    lock.release()
