"""`lockstep init`: the new project trains, passes its test, and is a job for every backend without changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import LOCKSTEP, PYTHON, ROOT, Result, clean_env, run


def _lockstep(folder: Path, *words: str, code: int = 0) -> Result:
    env = clean_env(LOCKSTEP_HOME=str(folder.parent / "home"), PYTHONPATH=str(ROOT), LOCKSTEP_THREADS="1")
    env["PATH"] = f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"
    command = [LOCKSTEP, *words] if words[0] != "make" else list(words)
    done = run(command, env, 400, cwd=folder)
    assert done.code == code and "Traceback" not in done.output, done.output
    return done


def test_a_new_project_trains_passes_its_test_and_is_a_job_for_every_backend(tmp_path: Path) -> None:
    """Only the environment is on the path, as the project's README says."""
    init = _lockstep(tmp_path, "init", "My Project_2")
    assert "make train && make test" in init.output
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
    output = _lockstep(folder, "lint", "job.yaml", "--backend", "k8s", "--image", "localhost:5000/mine:1").output
    assert output == ""
    status = subprocess.run(
        ["git", "status", "--porcelain", "-uall"], cwd=folder, check=True, capture_output=True, text=True
    )
    new = [line for line in status.stdout.splitlines() if not line.startswith("A ")]
    assert new == [], "its .gitignore knows what a run leaves"


@pytest.mark.promise("bad-input")
def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    for kind in ("file", "full", "link", "dotfile"):
        folder = tmp_path / kind
        folder.mkdir()
        target, file = folder / "mine", folder / "mine"
        if kind == "link":
            target.symlink_to(folder / "nowhere")
        elif kind != "file":
            target.mkdir()
            file = target / (".hidden" if kind == "dotfile" else "train.py")
        if kind != "link":
            file.write_text("mine")
        assert "mine" in _lockstep(folder, "init", "mine", code=2).output
        assert (kind == "link" and not (folder / "nowhere").exists()) or file.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    _lockstep(tmp_path / "empty", "init", ".")
    assert (tmp_path / "empty/train.py").exists()
    for wrong in ("file/mine/more", "___"):
        _lockstep(tmp_path, "init", wrong, code=2)
