"""Pre-flight checks of a container engine: what would keep a job from running there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from lockstep.training.contract import UserError

from ..manifest import get, holds
from ..spec.model import JobSpec
from ..spec.types import size_in_bytes
from ..status import Check
from . import engine

OLDEST = (2, 20)
"""From here on `--progress quiet`, `--no-recreate` and a file from standard input work together."""


def check(spec: JobSpec | None) -> list[Check]:
    """The checks in order; an engine that does not answer ends them."""
    try:
        about = json.loads(engine.docker("info", "--format", "{{json .}}"))
        if about.get("ServerErrors"):
            raise UserError(" ".join(about["ServerErrors"]))
    except (UserError, ValueError) as error:
        return [Check("engine", "missing", str(error))]
    name = f"{about.get('Name')}, Docker {about.get('ServerVersion')}, {about.get('Driver')}"
    return [Check("engine", "ok", name), *_compose(), *_limits(about), *(_job(spec, about) if spec else ())]


def _compose() -> Iterator[Check]:
    try:
        version = engine.docker("compose", "version", "--short").strip()
    except UserError as error:
        yield Check("compose", "missing", str(error))
        return
    numbers = tuple(
        int(part) for part in version.lstrip("v").split("-")[0].split("+")[0].split(".")[:2] if part.isdigit()
    )
    detail = version if numbers >= OLDEST else f"{version}: at least {OLDEST[0]}.{OLDEST[1]} is needed"
    yield Check("compose", "ok" if numbers >= OLDEST else "missing", detail)


def _limits(about: dict[str, Any]) -> Iterator[Check]:
    absent = [text for key, text in (("MemoryLimit", "memory"), ("CpuCfsQuota", "cpus")) if not about.get(key)]
    if absent:
        yield Check(
            "limits", "warning", f"the engine cannot limit {' and '.join(absent)} (rootless without cgroup v2?)"
        )
    else:
        yield Check("limits", "ok", f"memory and cpus, cgroup version {about.get('CgroupVersion')}")


def _job(spec: JobSpec, about: dict[str, Any]) -> Iterator[Check]:
    yield _image(spec)
    memory, needed = int(about.get("MemTotal") or 0), spec.nodes * size_in_bytes(spec.memory)
    detail = f"{spec.nodes} × {spec.memory} of {memory / (1 << 30):.1f} GiB"
    yield Check("memory", "ok" if needed <= memory else "missing", detail)
    cores, wanted = int(about.get("NCPU") or 0), spec.nodes * spec.cpus
    yield Check("cpus", "ok" if wanted <= cores else "warning", f"{wanted:g} of {cores}")
    if spec.cpus > cores:  # the engine refuses to create such a container
        yield Check("cpus of a node", "missing", f"{spec.cpus:g}, the machine has {cores}")
    if spec.gpus:
        ready = "nvidia" in (about.get("Runtimes") or {}) or bool(about.get("CDISpecDirs"))
        text = f"{spec.nodes} × {spec.gpus} of this machine"
        yield Check("gpus", "ok" if ready else "missing", text if ready else "install the NVIDIA container toolkit")
    for volume in spec.volumes:
        there = volume.claim in engine.volumes()
        yield Check("volume", "ok", volume.claim if there else f"{volume.claim} will be created")
    yield from _shards(spec)
    for secret in spec.secrets:
        present = secret in os.environ
        yield Check("secret", "ok" if present else "missing", secret if present else f"set {secret} in the environment")


def _shards(spec: JobSpec) -> Iterator[Check]:
    """Looks into the volume, with the job's own image and user."""
    folder = spec.shard_folder
    volume = next((item for item in spec.volumes if folder is not None and holds(item.path, folder)), None)
    if folder is None or volume is None or spec.image is None:
        return
    missing = f"{folder} is not on the volume {volume.claim}: lockstep prepare compose writes it"
    if volume.claim not in engine.volumes():
        yield Check("shards", "missing", missing)
        return
    mount = f"{volume.claim}:{volume.path}:ro"
    if _found(spec.image) is None:
        yield Check("shards", "cannot tell", "without the image")
        return
    try:
        engine.docker(
            "run", "--rm", "--network", "none", "--pull", "never", "--volume", mount, "--entrypoint", "test", spec.image,
            "-r", f"{folder}/manifest.json",
        )  # fmt: skip
    except UserError:
        yield Check("shards", "missing", missing)
        return
    yield Check("shards", "ok", folder)


def _found(image: str) -> dict[str, Any] | None:
    """What the engine knows of an image; None also where it cannot say."""
    try:
        return engine.image(image)
    except UserError:
        return None


def _image(spec: JobSpec) -> Check:
    if spec.image is None:
        return Check("image", "missing", "image is not set: add it to the job")
    found = _found(spec.image)
    if found is None:
        if engine.is_ours(spec.image):
            return Check("image", "missing", engine.not_built(spec.image))
        return Check("image", "warning", f"{spec.image} is not on this machine: submit will pull it")
    revision = get(found, "Config", "Labels", "org.opencontainers.image.revision") or "unknown"
    return Check(
        "image", "ok", f"{spec.image}, {int(found.get('Size') or 0) / 1e9:.2f} GB, revision {str(revision)[:12]}"
    )
