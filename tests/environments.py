"""Environments with some packages and not others: made of links to what is installed here, or by uv from an index."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.processes import PYTHON, ROOT, require

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

NO_INDEX = re.compile(
    r"Failed to fetch|error sending request|dns error|Network is unreachable|timed out", re.IGNORECASE
)


def project() -> dict[str, Any]:
    """The table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def declared(extra: str | None = None) -> set[str]:
    """Distributions that the project, or one of its extras, names."""
    texts = project()["dependencies"] if extra is None else project()["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def closure(names: set[str]) -> set[str]:
    """Returns these distributions and all that they depend on."""
    visited: set[tuple[str, str]] = set()
    open_ = {(name, "") for name in names}
    while open_:
        name, extra = open_.pop()
        visited.add((name, extra))
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                # With its extras: torch requires cuda-toolkit[cudart,…].
                open_ |= {
                    (canonicalize_name(requirement.name), option) for option in ("", *requirement.extras)
                } - visited
    return {name for name, _ in visited}


def linked(folder: Path, names: set[str]) -> Path:
    """A new environment with these distributions and what they depend on, as links; returns its site-packages."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for name in closure(names):
        about = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in about.files or []} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(Path(str(about.locate_file(part))))
    return site


def uv(*words: str, cwd: Path = ROOT) -> str:
    """Returns uv's output. Skips the test if no index is in reach and uv's cache lacks a package."""
    command = [PYTHON, "-m", "uv", "--no-progress", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    if result.returncode and NO_INDEX.search(result.stderr):
        problem = result.stderr
        result = subprocess.run(
            [*command, "--offline"], capture_output=True, text=True, cwd=cwd, timeout=300, check=False
        )
        reason = f"packages cannot be installed, no package index is in reach: {problem.strip()[-300:]}"
        require(result.returncode == 0, reason)
    assert result.returncode == 0, result.stderr
    return result.stdout
