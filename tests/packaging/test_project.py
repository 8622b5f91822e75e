"""`lockstep init`: what it writes trains, passes its own test, and is a job for every backend as it stands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, Result, clean_env, run

LOCKSTEP = str(Path(PYTHON).parent / "lockstep")


def _lockstep(folder: Path, *words: str, code: int = 0) -> Result:
    env = clean_env(LOCKSTEP_HOME=str(folder.parent / "home"), PYTHONPATH=str(ROOT), LOCKSTEP_THREADS="1")
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    command = [LOCKSTEP, *words] if words[0] != "make" else list(words)
    done = run(command, env, 400, cwd=folder)
    assert done.code == code and "Traceback" not in done.output, done.output
    return done


def test_a_new_project_trains_passes_its_own_test_and_is_a_job_for_every_backend(tmp_path: Path) -> None:
    """With nothing but the environment on the path, as the README of it says."""
    made = _lockstep(tmp_path, "init", "My Project_2")
    assert "make train && make test" in made.output
    folder = tmp_path / "My Project_2"
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    assert "@name@" not in "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    assert "Ran 2 tests" in _lockstep(folder, "make", "train", "test", "lint", "RANKS=1", "SET=config.epochs=1").output
    assert list(folder.glob("runs/*/summary.json"))
    for backend in ("k8s", "compose", "slurm"):
        rendered = _lockstep(folder, "render", backend, "job.yaml").output
        assert "my-project-2" in rendered and "error" not in rendered, rendered
    assert _lockstep(folder, "lint", "job.yaml").output == "", "what all backends have in common"
    pushed = _lockstep(folder, "lint", "job.yaml", "--backend", "k8s", "--image", "localhost:5000/mine:1").output
    assert pushed == ""
    left = subprocess.run(
        ["git", "status", "--porcelain", "-uall"], cwd=folder, check=True, capture_output=True, text=True
    )
    new = [line for line in left.stdout.splitlines() if not line.startswith("A ")]
    assert new == [], "its .gitignore knows what a run leaves"


@pytest.mark.promise("bad-input")
def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    for there in ("file", "full", "link", "dotfile"):
        folder = tmp_path / there
        folder.mkdir()
        target, kept = folder / "mine", folder / "mine"
        if there == "link":
            target.symlink_to(folder / "nowhere")
        elif there != "file":
            target.mkdir()
            kept = target / (".hidden" if there == "dotfile" else "train.py")
        if there != "link":
            kept.write_text("mine")
        assert "mine" in _lockstep(folder, "init", "mine", code=2).output
        assert (there == "link" and not (folder / "nowhere").exists()) or kept.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    _lockstep(tmp_path / "empty", "init", ".")
    assert (tmp_path / "empty/train.py").exists()
    for wrong in ("file/mine/more", "___"):
        _lockstep(tmp_path, "init", wrong, code=2)
