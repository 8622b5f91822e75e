"""Killed at every point of a save, full disks, read-only and vanished directories, damaged checkpoints."""

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

import pytest
import torch

from tests import product
from tests.conftest import Undisturbed
from tests.events import events
from tests.own.job import OwnJob
from tests.processes import require
from tests.runs import FINAL, Job, assert_same
from tests.warm.gang import python


def _save_in_child(directory: Path, step: int, kill_at: int = 0) -> int:
    """Saves in a forked child that is killed at its n-th touch of the disk. Returns the child's wait status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        state = {"shared": {"w": torch.full((1000,), float(step))}, "ranks": [{"x": step}]}
        product.save(directory, step, state, lambda number: number == kill_at and os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    except BaseException:
        os._exit(99)


@pytest.mark.promise("atomic-saves")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("before", [(1, 2, 3), (4,)], ids=["the next step", "the same step again"])
def test_killed_at_every_touch_of_the_disk_a_verified_checkpoint_remains(
    tmp_path: Path, before: tuple[int, ...]
) -> None:
    kill_at, status = 0, -1
    while status:
        kill_at += 1
        run = tmp_path / str(kill_at)
        directory = run / "checkpoints"
        assert [_save_in_child(directory, step) for step in before] == [0] * len(before)
        status = _save_in_child(directory, 4, kill_at)
        assert not status or os.WTERMSIG(status) == signal.SIGKILL
        before_clean = product.checkpoint_steps(run)  # nothing half there has a checkpoint's name
        product.clean(directory)  # puts back what was set aside while its step was saved again
        steps = product.checkpoint_steps(run)
        assert steps[0] in ((4, before[-1]) if status else (4,)) and (steps == before_clean or before == (4,))
        newest = product.checkpoint(directory / f"step-{steps[0]:08d}")
        assert newest["shared"]["w"][0] == steps[0]
        assert all(path.name.startswith("step-") for path in directory.iterdir())
        assert _save_in_child(directory, 5) == 0, "and the next save works"
    assert kill_at > 10


@pytest.mark.promise("atomic-saves")
@pytest.mark.parametrize(("touch", "later"), [(8, False), (60, True)])
def test_a_run_killed_inside_a_save_ends_in_the_same_weights(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed, touch: int, later: bool
) -> None:
    """The run is killed in its first save, or in a later one. The next start resumes from the checkpoint before, if there is one, and
    ends in the undisturbed weights."""
    job = Job(tmp_path / "run", data_root, 1)
    first = job.go(LOCKSTEP_TEST_WRITE=f"{touch}:KILL")
    assert first.code == -signal.SIGKILL, first.output
    assert job.steps() or not later, "killed before a checkpoint was whole: choose a later touch of the disk"
    result = job.go()
    assert result.code == 0, result.output
    assert re.search(r"Resuming at step [1-9]", result.output) or not later, result.output
    assert_same(job.run_dir, undisturbed(1))
    assert not list((job.run_dir / "checkpoints").glob(".*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 400 KB."""
    path = tmp_path / "disk"
    path.mkdir()
    result = _mount("size=400k", path)
    require(
        not result.returncode, f"cannot mount a tmpfs here ({result.stderr.strip()}): needs root with CAP_SYS_ADMIN"
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _mount(options: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True)


def _fill(disk: Path, leave: int) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - leave)
    return filler


@pytest.mark.promise("full-disk")
def test_a_disk_that_fills_up_costs_checkpoints_and_not_the_run(
    disk: Path, data_root: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = Job(disk / "run", data_root, 1, **{"checkpoint.keep": 200})
    job.words.append("checkpoint.every_steps=1")
    result = job.go()
    assert result.code == 1 and "the last checkpoint could not be saved" in result.output, result.output
    assert "Final validation accuracy" in result.output and "Traceback" not in result.output, result.output
    assert 4 <= job.steps()[0] < FINAL, "what was saved before verifies"
    _fill(disk, 0)
    assert python("-m", "lockstep", "export", str(job.run_dir), str(disk / "weights.pth")).code == 2
    assert {path.name for path in disk.iterdir()} == {"run", "filler"}
    assert not _mount("remount,size=4m", disk).returncode
    result = job.go()
    assert result.code == 0, result.output
    assert_same(job.run_dir, undisturbed(1))
    assert not _mount("remount,ro", disk).returncode
    result = job.go()
    assert result.code == 2 and "run directory" in result.output and "Traceback" not in result.output, result.output


@pytest.mark.promise("full-disk")
def test_a_disk_that_answers_with_its_own_timeout_costs_checkpoints_and_not_the_run(job: Job) -> None:
    """Each write raises a TimeoutError. The run takes it for a disk that refuses, not for one that hangs: it tries each save, and
    trains to its end."""
    result = job.go(LOCKSTEP_TEST_WRITE="0:REFUSE")
    assert result.code == 1 and "the last checkpoint could not be saved" in result.output, result.output
    assert "Final validation accuracy" in result.output and "did not answer" not in result.output, result.output
    assert len(events(job.run_dir, "checkpoint_failed")) > 2, "each is tried"


@pytest.mark.promise("full-disk", "signals")
def test_a_session_whose_disk_is_full_does_not_say_75(disk: Path) -> None:
    job = OwnJob(disk / "run", 1)
    _fill(disk, 16 << 10)
    result = job.go(LOCKSTEP_TEST_FATE="0:5:TERM")
    assert result.code == 1 and "could not save" in result.output and "No space left on device" in result.output, (
        result.output
    )
    assert list((disk / "run/checkpoints").glob("step-*")) == []


def test_a_run_directory_that_vanishes_costs_checkpoints_and_not_the_run(job: Job) -> None:
    result = job.go(LOCKSTEP_TEST_FATE="0:5:VANISH")
    # The folder comes back with the next save; what was lost with it cannot be.
    assert result.code == 0 and "Traceback" not in result.output, result.output
    assert job.steps()[0] == FINAL


@pytest.mark.promise("damaged-checkpoints")
@pytest.mark.parametrize(
    ("damage", "name"),
    [("flip", "state.safetensors"), ("remove", "manifest.json"), ("all", "state.safetensors")],
)
def test_damage_to_the_newest_checkpoint(
    tmp_path: Path, data_root: Path, undisturbed: Undisturbed, name: str, damage: str, halfway: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(halfway, run_dir)
    job = Job(run_dir, data_root, 1)
    before = job.steps()
    for step in before if damage == "all" else before[:1]:
        path = run_dir / f"checkpoints/step-{step:08d}" / name
        data = bytearray(path.read_bytes())
        at = random.Random(name + damage).randrange(len(data) - 2)
        data[at] ^= 1 << (at % 5)
        path.write_bytes(data)
        if damage == "remove":
            path.unlink()
    files = sorted((path, path.read_bytes()) for path in (run_dir / "checkpoints").rglob("*") if path.is_file())
    result = job.go()
    assert name in result.output, result.output
    if damage == "all":
        assert result.code == 2, result.output
        assert files == sorted(
            (path, path.read_bytes()) for path in (run_dir / "checkpoints").rglob("*") if path.is_file()
        )
        return
    assert result.code == 0 and f"Resuming at step {before[1]}" in result.output, result.output
    assert_same(run_dir, undisturbed(1))


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    job = Job(tmp_path_factory.mktemp("halfway") / "run", data_root, 1)
    assert job.go(LOCKSTEP_TEST_FATE="0:13:TERM").code == 75
    return job.run_dir
