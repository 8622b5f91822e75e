"""`code:` of a folder that is deep or holds many repositories: what it costs grows with what it holds, and ends in time."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.jobs.helpers import lockstep, own_code

BOUND = 20
FILES = 3000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_code(tmp_path, monkeypatch)


def _filled(folder: Path, depth: int) -> None:
    below = folder.joinpath(*["a"] * depth)
    below.mkdir(parents=True)
    for number in range(FILES):
        (below / f"f{number}").touch()


def _seconds(folder: Path) -> float:
    began = time.process_time()
    done = lockstep(folder, "lint", "job.yaml", "--backend", "slurm")
    assert (done.returncode, done.stderr) == (0, ""), done
    return time.process_time() - began


def test_files_of_a_deep_folder_cost_little_more_than_those_of_a_flat_one(folder: Path) -> None:
    _filled(folder / "flat", 3)
    _seconds(folder)  # what is imported once
    flat = _seconds(folder)
    shutil.rmtree(folder / "flat")
    _filled(folder / "deep", 400)
    assert _seconds(folder) < 4 * flat + 0.5


def test_names_that_differ_only_in_case_are_found_in_any_depth(folder: Path) -> None:
    for name in ("b/c/One", "b/c/one"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    done = lockstep(folder, "lint", "job.yaml", "--backend", "slurm")
    assert (done.returncode, "b/c/One and b/c/one differ only in case" in done.stderr) == (2, True), done
    (folder / "b/c/one").unlink()
    (folder / "B/c").mkdir(parents=True)
    (folder / "B/c/other").touch()
    done = lockstep(folder, "lint", "job.yaml", "--backend", "slurm")
    assert (done.returncode, "B and b differ only in case" in done.stderr) == (2, True), done


def test_many_repositories_and_a_slow_git_end_in_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    for number in range(25):
        subprocess.run(["git", "init", "-q", str(folder / f"r{number}")], check=True)
    slow = tmp_path / "bin/git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nsleep 0.7\nexec {shutil.which("git")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}{os.pathsep}{os.environ['PATH']}")
    began = time.monotonic()
    done = lockstep(folder, "lint", "job.yaml", "--backend", "slurm")
    assert time.monotonic() - began < BOUND
    assert done.returncode == 2 and "name a smaller folder" in done.stderr, done
