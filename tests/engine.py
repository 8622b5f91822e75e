"""A real container engine for tests: the CPU image, built once a session, and the removal of what a test started.

If no registry is in reach, `tests/containers/ci.sh` starts an engine and makes the base images. It puts their places
into BASE_IMAGE, WHEELS and PROMETHEUS_IMAGE, which the Makefile and these fixtures read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, poll, require

NAME = f"lockstep-test-{os.getpid()}"
"""Of this session alone: another one on the same engine must not remove its image."""
SENTINEL = "lockstep-sentinel-that-no-layer-may-hold"


def docker(*words: str, timeout: float = 120, check: bool = True, env: dict[str, str] | None = None) -> str:
    """What `docker WORDS` printed, both streams."""
    done = subprocess.run(
        ["docker", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert not check or done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}"
    return done.stdout


def inspect(*names: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", *names))
    return found


@dataclass(frozen=True)
class Built:
    """An image and how it was made."""

    name: str
    seconds: float
    output: str


def build(target: str, **variables: str) -> Built:
    """`make TARGET` for the tests' own image name."""
    began = time.monotonic()
    # BuildKit's plain progress names each step that was taken from the cache.
    env = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    words = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        ["make", target, f"IMAGE={NAME}", *words], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return Built(f"{NAME}:cpu" if target == "image-cpu" else f"{NAME}:latest", time.monotonic() - began, done.stdout)


@pytest.fixture(scope="session")
def engine() -> str:
    """The engine's version. Skips where there is none."""
    try:
        done = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=30
        )
        compose = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        require(False, f"no container engine: {error}")
        raise
    require(done.returncode == 0, f"no container engine: {done.stderr.strip()[-200:]}")
    require(compose.returncode == 0, "docker has no compose plugin")
    return done.stdout.strip()


@pytest.fixture(scope="session")
def cpu_image(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The CPU image of this source tree, built with this machine's certificates and a pip.conf as secrets."""
    paths = ssl.get_default_verify_paths()
    known = Path(paths.cafile or paths.openssl_cafile)
    folder = tmp_path_factory.mktemp("secrets")
    certificates, settings = folder / "ca.pem", folder / "pip.conf"
    certificates.write_text(f"# {SENTINEL}\n{known.read_text() if known.exists() else ''}")
    settings.write_text(f"# {SENTINEL}\n[global]\nretries = 5\n")
    built = build("image-cpu", CA=str(certificates), PIP_CONF=str(settings))
    print(f"\nCPU image: {built.seconds:.0f} s, {inspect(built.name)[0]['Size'] / 1e9:.2f} GB")
    yield built
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
            own = docker(*listing, "--filter", f"label=com.docker.compose.project=lockstep-{name}").split()
            if own:
                docker(*removing, *own)
        own = [item for item in docker("volume", "ls", "--quiet").split() if item in (
            f"lockstep-{name}-runs", f"lockstep-{name}-cancelled") or item.startswith(f"lockstep-{name}-code-")]  # fmt: skip
        if own:
            docker("volume", "rm", "--force", *own)


def answers(url: str) -> bool:
    """Whether something serves there, if only to say that it wants a password."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False


@contextlib.contextmanager
def registry_at(user: str = "") -> Iterator[str]:
    """HOST:PORT of a real registry: Debian's docker-registry on a base that reaches no other one.

    Args:
        user: who may use it, as `htpasswd` writes it; empty: everybody.
    """
    base = os.environ.get("BASE_IMAGE") or "python:3.11-slim-bookworm"
    apt = "apt-get -o Acquire::Retries=5"
    auth = r"auth: {htpasswd: {realm: here, path: /users}}\n" if user else ""
    config = r"version: 0.1\nstorage: {filesystem: {rootdirectory: /tmp/registry}}\nhttp: {addr: ':5000'}\n"
    recipe = f"FROM {base}\nRUN {apt} update && {apt} install -y --no-install-recommends docker-registry\n"
    start = f'printf "{config}{auth}" > /registry.yml; echo "$REGISTRY_USER" > /users; exec docker-registry serve /registry.yml'
    image = f"{NAME}-registry"
    done = subprocess.run(["docker", "build", "-q", "-t", image, "-"], input=recipe, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    # A known name, so that a container that was made and did not start is removed, too.
    container = re.sub("[:/]", "-", f"{image}-{uuid.uuid4().hex[:6]}")
    try:
        options = (
            "--name",
            container,
            "--detach",
            "--publish",
            "127.0.0.1::5000",
            "--env",
            f"REGISTRY_USER={user}",
            "--entrypoint",
            "sh",
        )
        docker("run", *options, image, "-c", start)
        address = docker("port", container, "5000").strip().splitlines()[0].replace("0.0.0.0", "127.0.0.1")
        try:
            poll(lambda: answers(f"http://{address}/v2/"), 60, f"a registry on {address}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {docker('logs', container)}") from None
        yield address
    finally:
        docker("rm", "--force", "--volumes", container, check=False)
        docker("image", "rm", "--force", image, check=False)
