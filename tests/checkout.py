"""The files of this repository, and a copy of them like a clone, in which tests run the pages' commands as a reader does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import PYTHON, ROOT, clean_env


def sources() -> list[str]:
    """Returns the names of the files that git tracks or would track; without a history, of all files."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\0")
    if len(names) < 100:
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*")]
        names = [str(path) for path in paths if not {"__pycache__", ".venv"} & set(path.parts)]
    return sorted(name for name in names if (ROOT / name).is_file() or (ROOT / name).is_symlink())


def copy_to(target: Path) -> Path:
    for name in sources():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def environment(here: Path, home: Path, **extra: str) -> dict[str, str]:
    """Variables of a reader's shell in the copy `here`: `lockstep` is on its path, and `make setup` was done.

    The virtual environment is a link to this one, from a folder that make sees as newer than pyproject.toml.
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
