"""A real container engine for tests: the CPU image, built once a session, and the removal of what a test started.

If no registry is in reach, `tests/containers/ci.sh` starts an engine and makes the base images. It puts their places
into BASE_IMAGE, WHEELS and PROMETHEUS_IMAGE, which the Makefile and these fixtures read.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, require

NAME = f"lockstep-test-{os.getpid()}"
"""Unique to this session: another session on the same engine does not remove its image."""
SENTINEL = "lockstep-sentinel-that-no-layer-may-hold"


def docker(*words: str, timeout: float = 120, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Returns the output of `docker WORDS`, both streams."""
    result = subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert not check or result.returncode == 0, f"docker {' '.join(words)}\n{result.stdout}"
    return result.stdout


def inspect(*names: str) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = json.loads(docker("inspect", *names))
    return objects


def build(target: str, **variables: str) -> str:
    """`make TARGET` for the tests' own image name. Returns the image with its tag."""
    words = [f"{name}={value}" for name, value in variables.items()]
    result = subprocess.run(
        ["make", target, f"IMAGE={NAME}", *words], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:]
    return f"{NAME}:cpu" if target == "image-cpu" else f"{NAME}:latest"


@pytest.fixture(scope="session")
def engine() -> str:
    """The engine's version. Skips where there is none."""
    try:
        result = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=30
        )
        compose = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        require(False, f"no container engine: {error}")
        raise
    require(result.returncode == 0, f"no container engine: {result.stderr.strip()[-200:]}")
    require(compose.returncode == 0, "docker has no compose plugin")
    return result.stdout.strip()


@pytest.fixture(scope="session")
def cpu_image(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The CPU image of this source tree, built with this machine's certificates and a pip.conf as secrets."""
    paths = ssl.get_default_verify_paths()
    bundle = Path(paths.cafile or paths.openssl_cafile)
    folder = tmp_path_factory.mktemp("secrets")
    certificates, settings = folder / "ca.pem", folder / "pip.conf"
    certificates.write_text(f"# {SENTINEL}\n{bundle.read_text() if bundle.exists() else ''}")
    settings.write_text(f"# {SENTINEL}\n[global]\nretries = 5\n")
    yield build("image-cpu", CA=str(certificates), PIP_CONF=str(settings))
    names = docker("images", "--format", "{{.Repository}}:{{.Tag}}", "--filter", f"reference={NAME}:*").split()
    if names:
        docker("image", "rm", "--force", *names)


def remove_jobs(*names: str) -> None:
    """Removes jobs of the Compose backend with their own volumes, whatever state they are in."""
    for name in names:
        for listing, removing in (
            (("ps", "--all", "--quiet"), ("rm", "--force", "--volumes")),
            (("network", "ls", "--quiet"), ("network", "rm")),
        ):
            ids = docker(*listing, "--filter", f"label=com.docker.compose.project=lockstep-{name}").split()
            if ids:
                docker(*removing, *ids)
        volumes = [item for item in docker("volume", "ls", "--quiet").split()
                   if item == f"lockstep-{name}-runs" or item.startswith(f"lockstep-{name}-code-")]  # fmt: skip
        if volumes:
            docker("volume", "rm", "--force", *volumes)
