"""`lockstep init`: what it writes trains, passes its own test, and is a job for every backend as it stands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.jobs.project.create import KINDS, create
from lockstep.training.contract import UserError
from tests.jobs.helpers import lockstep
from tests.processes import PYTHON, ROOT, clean_env, run

FILES = {".github/workflows/test.yml", ".gitignore", ".lockstepignore", "Dockerfile", "Makefile", "README.md", "job.yaml", "net.py",
         "test_train.py"}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_trains_and_passes_its_own_test(tmp_path: Path, kind: str) -> None:
    """With nothing but the environment on the path, as the README of it says."""
    env = clean_env(PATH=f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    env["LOCKSTEP_THREADS"] = "1"
    words = ["init", "mine", *(["--recipe"] if kind == "recipe" else [])]
    made = run([str(Path(PYTHON).parent / "lockstep"), *words], env, cwd=tmp_path)
    assert made.code == 0 and "cd mine && make train && make test" in made.output
    done = run(["make", "train", "test", "lint"], env, 400, cwd=tmp_path / "mine")
    assert done.code == 0 and "Ran 2 tests" in done.output, done.output
    assert (tmp_path / "mine/runs/mine/summary.json").exists()
    own = env | {"LOCKSTEP_HOME": str(tmp_path / "home")}
    for words in (["submit", "local", "job.yaml"], ["wait", "local", "mine"]):
        done = run([str(Path(PYTHON).parent / "lockstep"), *words], own, 120, cwd=tmp_path / "mine")
        assert done.code == 0, done.output
    left = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    ignored = {name for name in left if name.startswith(("runs/", "data/")) or "__pycache__" in name}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "mine", check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path / "mine", check=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=tmp_path / "mine", check=True, capture_output=True, text=True)
    assert set(tracked.stdout.split()) == left - ignored, "its .gitignore knows what a run leaves"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_is_a_job_for_every_backend(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    files = set(create(tmp_path / "My Project_2", kind))
    folder = tmp_path / "My Project_2"
    assert files == FILES | ({"train.py"} if kind == "loop" else {"recipe.yaml", "samples.py"})
    text = "".join((folder / name).read_text() for name in files)
    assert not any(f"@{place}@" in text for place in ("name", *KINDS[kind]))
    assert yaml.safe_load((folder / "job.yaml").read_text())["name"] == "my-project-2"
    for backend in ("k8s", "compose", "slurm"):
        done = lockstep(folder, "render", backend, "job.yaml")
        assert done.returncode == 0 and "my-project-2" in done.stdout, done.stderr
        assert "error" not in done.stderr
    done = lockstep(folder, "lint", "job.yaml")
    assert done.returncode == 0 and [line.split()[0] for line in (done.stdout + done.stderr).splitlines()] == [
        "LS016"
    ], "the image's tag, and nothing else"
    assert "train.py" in text and (folder / "test_train.py").stat().st_mode & 0o077 == 0o044


@pytest.mark.parametrize("there", ["file", "full", "link", "dotfile"])
def test_nothing_that_is_there_is_overwritten(tmp_path: Path, there: str) -> None:
    target = tmp_path / "mine"
    if there == "file":
        target.write_text("mine")
    elif there == "link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
        (target / (".hidden" if there == "dotfile" else "train.py")).write_text("mine")
    with pytest.raises(UserError, match="new or empty"):
        create(target, "loop")
    kept = target if there == "file" else next(iter(target.iterdir()), None) if target.is_dir() else None
    assert kept is None or kept.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_filled_and_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "train.py" in create(Path(), "loop") and (tmp_path / "here/train.py").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        create(tmp_path / "file/mine", "loop")
    with pytest.raises(UserError, match="name of a job"):
        create(tmp_path / "___", "loop")
    assert create(tmp_path / "___", "loop", "good") and not list(tmp_path.glob(".___*"))


def test_the_package_has_the_templates() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert "project/templates/*/*" in text
    assert not list((ROOT / "jobs/project/templates").rglob(".*")), "a build leaves these out"
