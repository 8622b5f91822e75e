"""The run directory: whose it is, who may use it, and what is recorded in it."""

from __future__ import annotations

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


def _open(path: Path, *words: str) -> RunDirectory:
    return RunDirectory.open(path, product.recipe("smoke", *words), fresh=False)


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


@pytest.mark.promise("fresh")
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


def test_no_secret_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    run = _open(tmp_path / "run")
    facts = {"global_batch_size": 128, "data": {"name": "digits", "checksum": "0"}}
    run.describe(product.recipe(), World(), facts, "1 thread")
    run.close()
    assert b"hunter2" not in (tmp_path / "run/run.yaml").read_bytes()
