"""Killed at every point of a save, full disks, read-only and vanished directories, damaged files."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import files
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.store import Writer
from tests.conftest import Undisturbed
from tests.nets import WRITE_POINTS
from tests.processes import require
from tests.runs import FINAL, Job, assert_same


def _state(step: int) -> dict[str, Any]:
    return {"shared": {"w": torch.full((1000,), float(step))}, "ranks": [{"x": step}]}


def _save_in_child(directory: Path, step: int, kill_at: int) -> int:
    """Saves in a forked child that is killed at its n-th touch of the disk. Returns the child's wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        touched = [0]

        def watched(function: Any) -> Any:
            def call(*args: Any) -> Any:
                touched[0] += 1
                if touched[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args)

            return call

        for name in WRITE_POINTS:
            setattr(files, name, watched(getattr(files, name)))
        Writer(directory, keep=2, keep_best=False).save(step, _state(step)).result()
        os._exit(0)
    except BaseException:
        os._exit(99)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_while_a_step_is_saved_again_one_of_the_two_remains(tmp_path: Path) -> None:
    kill_at, survived = 1, False
    while not survived:
        directory = tmp_path / str(kill_at)
        assert _save_in_child(directory, 4, kill_at=10**9) == 0
        survived = _save_in_child(directory, 4, kill_at) == 0
        store.clean(directory)  # as the next start does
        newest = store.newest_verified(directory)
        assert newest is not None and store.step_of(newest) == 4
        assert [path.name for path in directory.iterdir()] == ["step-00000004"]
        kill_at += 1
    assert kill_at > 10


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_at_every_touch_of_the_disk_a_verified_checkpoint_remains(tmp_path: Path) -> None:
    kill_at, survived = 1, False
    while not survived:
        directory = tmp_path / str(kill_at)
        for step in (1, 2, 3):
            assert _save_in_child(directory, step, kill_at=10**9) == 0
        status = _save_in_child(directory, 4, kill_at)
        survived = status == 0
        assert survived or os.WTERMSIG(status) == signal.SIGKILL
        newest = store.newest_verified(directory)
        assert newest is not None and store.step_of(newest) in ((4,) if survived else (3, 4))
        assert store.load(newest)["shared"]["w"][0] == store.step_of(newest)
        for path in store.candidates(directory):
            store.verify(path)  # nothing half there has a checkpoint's name
        store.clean(directory)
        assert all(path.name.startswith("step-") for path in directory.iterdir())
        assert _save_in_child(directory, 5, kill_at=10**9) == 0  # and the next save works
        kill_at += 1
    assert kill_at > 10


@pytest.mark.parametrize(("touch", "later"), [(3, 0), (8, 0), (12, 0), (17, 0), (21, 0), (60, 1), (110, 1)])
def test_a_run_killed_inside_a_save_ends_in_the_same_weights(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed, touch: int, later: int
) -> None:
    """In the first save of all, or in a later one: the next start then goes on from the checkpoint before, and a start from
    step 0 would end in the same weights whatever a checkpoint leaves out."""
    job = Job(tmp_path / "run", data_root, 1)
    died = job.go(LOCKSTEP_TEST_WRITE=f"{touch}:KILL")
    assert died.code == -signal.SIGKILL, died.output
    assert job.steps() or not later, "killed before a checkpoint was whole: choose a later touch of the disk"
    done = job.go()
    assert done.code == 0, done.output
    assert re.search(r"Resuming at step [1-9]", done.output) or not later, done.output
    assert_same(job.run_dir, undisturbed(1))
    assert not list((job.run_dir / "checkpoints").glob(".*"))


@contextlib.contextmanager
def _mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)
    require(not done.returncode, f"cannot mount a tmpfs here ({done.stderr.strip()}): needs root with CAP_SYS_ADMIN")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_costs_checkpoints_and_not_the_run(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed
) -> None:
    with _mounted(tmp_path / "disk", "size=512k") as disk:
        job = Job(disk / "run", data_root, 1)
        job.run_dir.mkdir()
        filler = job.run_dir / "filler"
        filler.write_bytes(b"\0" * 420_000)
        done = job.go()
        assert done.code == 1 and "the last checkpoint could not be saved" in done.output, done.output
        assert done.output.count("a checkpoint could not be saved, the run continues") >= 10
        assert "Final validation accuracy" in done.output and "Traceback" not in done.output
        filler.unlink()
        done = job.go()
        assert done.code == 0, done.output
        assert_same(job.run_dir, undisturbed(1))


def test_a_disk_that_fills_up_half_way(tmp_path: Path, data_root: Path) -> None:
    with _mounted(tmp_path / "disk", "size=400k") as disk:
        job = Job(disk / "run", data_root, 1, **{"checkpoint.keep": 200, "epochs": 9})
        done = job.go()
        assert done.code == 1, done.output
        assert "a checkpoint could not be saved, the run continues" in done.output, done.output
        assert job.steps()[0] >= 4  # what was saved before verifies


def test_a_read_only_directory_is_exit_2(tmp_path: Path, data_root: Path) -> None:
    with _mounted(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        job = Job(disk / "run", data_root, 1)
        done = job.go()
        assert done.code == 2 and "cannot use the run directory" in done.output and "Traceback" not in done.output


def test_a_run_directory_that_vanishes_costs_checkpoints_and_not_the_run(job: Job) -> None:
    done = job.go(LOCKSTEP_TEST_FATE="0:5:VANISH")
    # The folder comes back with the next save; what was lost with it cannot be.
    assert done.code == 0 and "Traceback" not in done.output, done.output
    assert job.steps()[0] == FINAL


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_to_the_newest_checkpoint(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed, name: str, damage: str, halfway: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(halfway, run_dir)
    job = Job(run_dir, data_root, 1)
    before = job.steps()
    path = run_dir / "checkpoints" / f"step-{before[0]:08d}" / name
    data = bytearray(path.read_bytes())
    at = random.Random(name + damage).randrange(len(data) - 2)
    data[at] ^= 1 << (at % 5)
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:at])
    done = job.go()
    assert done.code == 0 and f"Resuming at step {before[1]}" in done.output, done.output
    assert "checkpoint is corrupt and not used" in done.output and name in done.output
    assert_same(run_dir, undisturbed(1))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    job = Job(tmp_path_factory.mktemp("halfway") / "run", data_root, 1)
    assert job.go(LOCKSTEP_TEST_FATE="0:13:TERM").code == 75
    return job.run_dir
