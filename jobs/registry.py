"""The table of backends: packages with a module `backend`, whose `BACKEND` is a `lockstep.jobs.backend.Backend`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lockstep.training.config import settings
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from .backend import Backend

BACKENDS = {
    "local": "lockstep.jobs.local",
    "k8s": "lockstep.jobs.kubernetes",
    "slurm": "lockstep.jobs.slurm",
    "compose": "lockstep.jobs.compose",
}
"""Name → package."""
ALIASES = {"kubernetes": "k8s"}


def backend(name: str) -> type[Backend]:
    """The backend of that name; imports only this one. Raises `UserError` for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}{settings.nearest(name, BACKENDS)}")
    found: type[Backend] = importlib.import_module(f"{BACKENDS[name]}.backend").BACKEND
    return found
