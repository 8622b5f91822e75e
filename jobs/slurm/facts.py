"""What the cluster's files say of a job before it is submitted; the rules read it."""

from __future__ import annotations

from pathlib import PurePosixPath

from lockstep.jobs.slurm.section import slurm
from lockstep.jobs.slurm.transport.base import Transport
from lockstep.jobs.spec.model import JobSpec

_PACKAGES = ("opt/venv", "usr", "usr/local", "opt/conda")


def look(spec: JobSpec, transport: Transport) -> dict[str, str]:
    """`no_shards`: the folder that is missing. `no_submitit`: the image without it; "" where all is well or unknown."""
    folder = spec.shard_folder
    missing = folder is not None and not transport.exists(folder)
    return {"no_shards": str(folder) if missing else "", "no_submitit": _without_submitit(spec, transport)}


def _without_submitit(spec: JobSpec, transport: Transport) -> str:
    """An image that is a folder shows what it holds."""
    image = slurm(spec).image or spec.image
    if slurm(spec).container is None or not image:
        return ""
    inside = PurePosixPath(transport.place().resolve(image))
    if not transport.exists(inside / "usr"):
        return ""
    packages = [
        inside / place / "lib" / version / found
        for place in _PACKAGES
        for version in transport.names(inside / place / "lib") if version.startswith("python3")
        for found in transport.names(inside / place / "lib" / version) if found.endswith("-packages")
    ]  # fmt: skip
    return image if packages and not any(transport.exists(path / "submitit") for path in packages) else ""
