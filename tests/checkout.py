"""A copy of the repository as a clone has it, in which what the documentation prints is run as a reader runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import PYTHON, ROOT, clean_env

SOURCES = ("lockstep", "training", "jobs", "examples", "docs", "deploy", "docker", "Makefile", "job.yaml", "pyproject.toml",
           "README.md", "LICENSE", ".dockerignore")  # fmt: skip


def copy_to(target: Path) -> Path:
    """What git keeps of this repository, or would keep; where there is no history, the sources as they lie."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(git, cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")
    if len(files) < 100:
        found = [
            path
            for part in SOURCES
            for path in [ROOT / part, *(ROOT / part).rglob("*")]
            if path.is_file() or path.is_symlink()
        ]
        files = [str(path.relative_to(ROOT)).encode() for path in found]
    for name in filter(None, (name.decode() for name in files)):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def environment(here: Path, home: Path, **extra: str) -> dict[str, str]:
    """Variables of a reader's shell in the copy `here`: `lockstep` is on its path, and `make setup` was done.

    The virtual environment is this one, seen from a folder of its own that make finds newer than pyproject.toml.
    """
    home.mkdir(parents=True, exist_ok=True)
    venv = home / "venv"
    if not venv.exists():
        venv.mkdir()
        for path in Path(sys.prefix).iterdir():
            if path.name not in (".train", ".ready"):
                (venv / path.name).symlink_to(path)
        (venv / ".train").touch()
        (venv / ".ready").touch()
    env = clean_env(LOCKSTEP_HOME=str(home / "lockstep"), VENV=str(venv), PYTHONPATH=str(here), **extra)
    return {**env, "PATH": f"{Path(PYTHON).parent}{os.pathsep}{env['PATH']}"}
