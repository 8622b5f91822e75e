"""tests/containers/ci.sh on an engine that runs already: what it made for the tests is gone afterwards, the rest stays.

The engine is a folder of files behind a program `docker`; no registry is in its reach.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT

ENGINE = """#!/bin/sh
images={images}
name() {{ echo "$images/$(echo "$1" | tr /: __)"; }}
case "$1 $2" in
    "image inspect") [ -e "$(name "$3")" ] ;;
    "image rm") shift 3; for image; do rm "$(name "$image")" || exit 1; done ;;
    pull*) exit 1 ;;
    import*) for image; do :; done; touch "$(name "$image")" ;;
    build*) cat > /dev/null; touch "$(name "$4")" ;;
esac
"""
OURS = ["lockstep-base_bookworm", "lockstep-prometheus_debian"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    for folder in (images, tmp_path / "bin", tmp_path / "cache"):
        folder.mkdir()
    (tmp_path / "cache/bookworm-rootfs.tar").write_bytes(b"a root file system")
    program = tmp_path / "bin/docker"
    program.write_text(ENGINE.format(images=images))
    program.chmod(0o755)
    (images / "somebody_1").touch()
    return images


def ci(images: Path, *command: str) -> int:
    folder = images.parent
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("BASE_IMAGE", "PROMETHEUS_IMAGE", "DOCKER_HOST")
    }
    env = {
        **kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOCKSTEP_CI_CACHE": str(folder / "cache"),
        "WHEELS": str(folder), "MIRROR": "http://mirror.invalid/debian",
    }  # fmt: skip
    return subprocess.run([ROOT / "tests/containers/ci.sh", *command], env=env, timeout=60).returncode


def names(images: Path) -> list[str]:
    return sorted(path.name for path in images.iterdir())


@pytest.mark.parametrize("code", [0, 3])
def test_what_was_made_for_the_tests_is_gone_afterwards(images: Path, code: int) -> None:
    seen = images.parent / "seen"
    assert ci(images, "sh", "-c", f"ls {images} > {seen}; exit {code}") == code
    assert seen.read_text().split() == [*OURS, "somebody_1"], "there while the command ran"
    assert names(images) == ["somebody_1"]


def test_what_was_there_before_stays(images: Path) -> None:
    (images / OURS[0]).touch()
    assert ci(images, "true") == 0
    assert names(images) == [OURS[0], "somebody_1"]
