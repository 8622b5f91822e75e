"""Cluster profiles: what is true of a cluster and not of a job, kept in a file of its own and named by `--profile`.

A profile holds settings of job.yaml; the job's own settings and the flags win over it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lockstep.training.config import settings
from lockstep.training.contract import UserError

from .model import JobSpec

ALLOWED = ("slurm", "env", "cpus", "memory", "time_limit", "max_restarts", "grace_seconds", "shards", "gpus")


def places() -> list[Path]:
    """Folders that are searched for NAME.yaml, the nearest first; the last one has the profiles that come with Lockstep."""
    own = os.environ.get("LOCKSTEP_PROFILES")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [*([Path(own)] if own else []), config / "lockstep/profiles", Path(__file__).parent / "cluster_profiles"]


def load(name: str) -> dict[str, Any]:
    """The settings of a profile: a name, or the path of a YAML file. Raises `UserError`."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    else:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise UserError(f"--profile takes a name or the path of a .yaml file, got {name!r}")
        found = [folder / f"{name}.yaml" for folder in places() if (folder / f"{name}.yaml").exists()]
        if not found:
            known = {path.stem for folder in places() for path in folder.glob("*.yaml")}
            where = ", ".join(str(folder) for folder in places())
            raise UserError(f"there is no profile {name!r} in {where}{settings.nearest(name, known)}")
        path = found[0]
    text = settings.read_text(path)
    values = settings.mapping(text, str(path))
    unknown = [key for key in values if key not in ALLOWED]
    if unknown:
        raise UserError(f"{path}: a profile holds {', '.join(ALLOWED)}; {unknown[0]!r} belongs in the job")
    # By itself: a mistake that is found in the whole job would be looked for in the job's file.
    settings.build(JobSpec, {"name": "a", "recipe": "smoke", **values}, str(path), lines=settings.lines_of(text))
    return values
