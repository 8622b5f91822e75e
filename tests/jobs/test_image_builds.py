"""How the images are built, as `make` says it to a program `docker`: no engine is needed to read that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT

RECORDER = """#!{python}
import json, os, sys
piped = sys.stdin.read() if "-" in sys.argv else ""
said = {{"words": sys.argv[1:], "dockerfile": piped, "buildkit": os.environ.get("DOCKER_BUILDKIT")}}
open({out!r}, "w").write(json.dumps(said))
"""


class Recorded:
    def __init__(self, folder: Path) -> None:
        self.out, self.bin = folder / "said.json", folder / "bin"
        self.bin.mkdir()
        program = self.bin / "docker"
        program.write_text(RECORDER.format(python=sys.executable, out=str(self.out)))
        program.chmod(0o755)

    def make(self, *words: str) -> subprocess.CompletedProcess[str]:
        kept = {
            name: value for name, value in os.environ.items() if name not in ("WHEELS", "BASE_IMAGE", "CA", "PIP_CONF")
        }
        env = {**kept, "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.run(["make", *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    def build(self, *words: str) -> tuple[list[str], str, str]:
        """(words, Dockerfile that was piped, DOCKER_BUILDKIT) of the one build."""
        done = self.make(*words)
        assert done.returncode == 0, done.stderr
        said = json.loads(self.out.read_text())
        return said["words"], said["dockerfile"], said["buildkit"]


@pytest.fixture
def docker(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def option(words: list[str], name: str) -> list[str]:
    return [words[index + 1] for index, word in enumerate(words) if word == name]


@pytest.mark.parametrize(("target", "file"), [("image", "docker/Dockerfile"), ("image-cpu", "docker/Dockerfile.cpu")])
def test_images_are_of_the_platform_that_is_locked(docker: Recorded, target: str, file: str) -> None:
    """torch's CPU build is locked with the one file for x86-64: on arm64 the engine must emulate, not fail."""
    for more in ((), ("BUILDKIT=0",)):
        words, _, _ = docker.build(target, *more)
        assert option(words, "--platform") == ["linux/amd64"]
    words, _, buildkit = docker.build(target)
    assert option(words, "-f") == [file] and buildkit == "1"
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert services["node"]["platform"] == "linux/amd64"


@pytest.mark.parametrize("target", ["image", "image-cpu"])
def test_secrets_are_mounted_and_are_no_arguments(docker: Recorded, target: str) -> None:
    words, _, _ = docker.build(target, "CA=/etc/ca.pem", "PIP_CONF=/home/me/pip.conf", "WHEELS=/wheels")
    assert option(words, "--secret") == ["id=ca,src=/etc/ca.pem", "id=pip,src=/home/me/pip.conf"]
    assert option(words, "--build-context") == ["wheels=/wheels"]
    assert not any("pip.conf" in word for word in option(words, "--build-arg"))
    file = (ROOT / option(words, "-f")[0]).read_text()
    assert "--mount=type=secret,id=ca " in file and "--mount=type=secret,id=pip " in file


@pytest.mark.parametrize(("target", "file"), [("image", "docker/Dockerfile"), ("image-cpu", "docker/Dockerfile.cpu")])
def test_without_buildkit_only_the_mounts_are_gone(docker: Recorded, target: str, file: str) -> None:
    words, piped, buildkit = docker.build(
        target, "BUILDKIT=0", "BUILD_FLAGS=--build-arg PIP_INDEX_URL=http://mirror/simple"
    )
    assert buildkit == "0" and option(words, "-f") == ["-"] and words[-1] == "."
    assert option(words, "--target") == ["runtime"], "every stage up to the wanted one is built, dev would be, too"
    assert "PIP_INDEX_URL=http://mirror/simple" in option(words, "--build-arg")
    lines = piped.splitlines()
    assert "--mount" not in piped and not any("AS wheels" in line for line in lines)
    kept = [
        line for line in (ROOT / file).read_text().splitlines() if "--mount" not in line and "AS wheels" not in line
    ]
    assert [line for line in lines if line != "RUN \\"] == kept and lines.count("RUN \\") == 1
    for word in ("CA=/etc/ca.pem", "PIP_CONF=/pip.conf", "WHEELS=/wheels"):
        done = docker.make(target, "BUILDKIT=0", word)
        assert done.returncode == 2 and "need BuildKit" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PIP_INDEX_URL", "https://me:hunter2@mirror.example/simple"),
        ("PIP_EXTRA_INDEX_URL", "https://mirror.example/a https://token@mirror.example/b"),
        ("PIP_FIND_LINKS", "/wheels https://me:hunter2@mirror.example/"),
    ],
)
def test_a_password_in_an_argument_is_refused(tmp_path: Path, name: str, value: str) -> None:
    """PATH has no program at all: the script ends where it would install."""
    words = ["/bin/sh", str(ROOT / "docker/install.sh"), "none.txt"]
    done = subprocess.run(words, env={"PATH": str(tmp_path), name: value}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and f"error: {name} holds a user or password" in done.stderr
    assert "hunter2" not in done.stderr and "token" not in done.stderr
    plain = {"PATH": str(tmp_path), "PIP_INDEX_URL": "https://mirror.example/~me@team/simple"}
    done = subprocess.run(words, env=plain, capture_output=True, text=True, timeout=30)
    assert done.returncode == 127 and "password" not in done.stderr, "an @ in the path is none"
