"""What the images install: every file by its hash, and within the project's own ranges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.processes import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]


def names(*files: str) -> set[str]:
    lines = [line for file in files for line in (ROOT / "docker" / file).read_text().splitlines()]
    return {line.split("=")[0].strip() for line in lines if line and not line.startswith("#")}


def locked(path: Path) -> dict[str, tuple[Version, int]]:
    """name → (version, number of hashes)"""
    blocks = re.split(r"\n(?=[a-z0-9])", path.read_text())
    found = {}
    for block in blocks:
        match = re.match(r"([a-z0-9.-]+)==(\S+)", block)
        if match:
            found[match[1]] = (Version(match[2]), len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", block)))
    return found


@pytest.mark.parametrize(
    ("variant", "excluded"), [("cuda", ("excluded.txt",)), ("cpu", ("excluded.txt", "excluded-cpu.txt"))]
)
def test_the_lock_is_the_projects(variant: str, excluded: tuple[str, ...]) -> None:
    found = locked(ROOT / f"docker/requirements-{variant}.txt")
    assert found and all(hashes for _, hashes in found.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left_out = names(*excluded)
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["train"] + extras["slurm"]  # submitit runs in the container, too
    for text in needed:
        wanted = Requirement(text)
        if wanted.name in left_out:
            assert wanted.name not in found
            continue
        assert wanted.name in found, f"{wanted.name} is not locked: make lock"
        assert wanted.specifier.contains(found[wanted.name][0], prereleases=True), f"{wanted.name}: make lock"
    assert left_out <= {Requirement(text).name for text in needed}, "an exclusion that excludes nothing"
    assert any(name.startswith("nvidia-") for name in found) == (variant == "cuda")
