"""The container engine, through its own command line: `docker` and `docker compose`. Every refusal is one line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.training.contract import UserError
from lockstep.wire.archive import File, pack

from ..logs import BLOCK, LineSplitter
from ..status import Unreachable

_INSIDE = "/volume"
_NO_ANSWER = "Cannot connect to the Docker daemon|error during connect|request returned|unexpected EOF|deadline exceeded|i/o timeout"
"""Errors of docker if the engine, or a proxy in front of it, does not answer."""
_ADVICE = (
    (_NO_ANSWER, "no container engine answers at {where}: start Docker, or set DOCKER_HOST"),
    (
        "permission denied.*docker.*sock",
        "this user may not use the container engine: join the group docker, or use rootless Docker",
    ),
    (
        "is not a docker command|unknown shorthand flag: 'f'",
        "docker has no compose plugin: install docker-compose-v2 (docker-compose-plugin)",
    ),
    (
        "pull access denied|manifest unknown|No such image",
        "{line}: build it (make image-cpu, make image), or check the name",
    ),
)
"""Patterns of docker's errors → advice. The first pattern that matches counts."""
TIMEOUT = 120.0
"""Seconds that a query of the engine may take. Starts and stops have their own bounds."""
UP_SECONDS = 600.0
"""Seconds that the creation of a job's containers may take, with the pull of its image."""


class EngineError(UserError):
    """An error for a command that the engine refuses. The text is the engine's error output, as one line."""


class EngineDown(EngineError, Unreachable):
    """An error for an engine that does not answer."""


def docker(*words: str, stdin: bytes = b"", timeout: float = TIMEOUT, env: Mapping[str, str] | None = None) -> str:
    """Returns the standard output of `docker WORDS`. `env`: variables in addition to this process's. Raises `EngineError`."""
    return _run(words, stdin, timeout, env).decode(errors="replace")


def _run(words: Sequence[str], stdin: bytes, timeout: float, env: Mapping[str, str] | None = None) -> bytes:
    variables = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            ["docker", *words], input=stdin, capture_output=True, timeout=timeout, check=False, env=variables
        )
    except FileNotFoundError:
        raise EngineError("docker is not installed: install Docker with its compose plugin") from None
    except subprocess.TimeoutExpired:
        raise EngineDown(
            f"docker {words[0]} did not answer within {timeout:g} s: check that the container engine runs"
        ) from None
    if done.returncode != 0:
        errors = done.stderr.decode(errors="replace")
        raise (EngineDown if re.search(_NO_ANSWER, errors) else EngineError)(explain(words, errors))
    return done.stdout


def explain(words: Sequence[str], errors: str) -> str:
    """Returns one line of docker's output: the last line that names an error, or advice if the error is known."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "level=warning" not in line]
    line = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it gave no reason")
    for pattern, advice in _ADVICE:
        if re.search(pattern, errors, re.DOTALL):
            return advice.format(line=line[:300], where=os.environ.get("DOCKER_HOST", "its default socket"))
    return f"docker {words[0]}: {line[:400]}"


def image(name: str) -> dict[str, Any] | None:
    """Returns the result of `docker image inspect`; None if this machine does not have the image. Raises `EngineError`."""
    try:
        (about,) = json.loads(docker("image", "inspect", name))
    except EngineError as error:
        if "No such image" not in str(error) and "not found" not in str(error).lower():
            raise
        return None
    return about if isinstance(about, dict) else None


def containers(*labels: str) -> list[dict[str, Any]]:
    """Returns `docker inspect` of all containers with these labels, also of stopped ones."""
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    ids = docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
    if not ids:
        return []
    try:
        inspected = json.loads(docker("inspect", "--type", "container", *ids))
    except EngineError as error:
        if "No such container" not in str(error):
            raise
        return containers(*labels)  # a container was removed in between
    return inspected if isinstance(inspected, list) else []


def volumes(*labels: str) -> list[str]:
    """Returns the names of the volumes with these labels."""
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return docker("volume", "ls", "--quiet", *filters).split()


def read_file(container: str, path: str) -> tuple[bytes, float] | None:
    """Returns a file of a container, running or not, and its time (Unix seconds); None if there is no such file."""
    try:
        data = _run(("cp", f"{container}:{path}", "-"), b"", TIMEOUT)
    except EngineError as error:
        # The last one: the container is being removed.
        if re.search("Could not find the file|[Nn]o such|RWLayer of container", str(error)):
            return None
        raise
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                return file.read(), float(member.mtime)
    return None


def write_volume(volume: str, image: str, name: str, data: bytes, label: str) -> None:
    """Writes a file that every user may read into a volume, through a container of the image that is never started.

    Args:
        label: label of that container, by which a later command finds it after a kill.

    Raises:
        EngineError: no such image, or the engine's disk is full.
    """
    mount = f"type=volume,source={volume},target={_INSIDE}"
    container = docker("create", "--label", label, "--mount", mount, image, "true", timeout=600).split()[-1]
    try:
        docker("cp", "-", f"{container}:{_INSIDE}", stdin=pack([File(name, False, data)]))
    finally:
        docker("rm", "--force", container)


def log_lines(container: str, since: str) -> Iterator[tuple[str, str]]:
    """Yields (time, line) of a container's output from that time on, both streams; "": from its start."""
    words = ["docker", "logs", "--timestamps", *(["--since", since] if since else []), container]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        pieces = LineSplitter()
        while chunk := os.read(process.stdout.fileno(), BLOCK):
            yield from map(_stamped, pieces.of(chunk))
        if rest := pieces.rest():
            yield _stamped(rest)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _stamped(raw: bytes) -> tuple[str, str]:
    time, _, line = raw.decode(errors="replace").rstrip("\r").partition(" ")
    return time, line
