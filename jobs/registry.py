"""The table of backends.

A backend is a package with a module `backend`, whose `BACKEND` is a `lockstep.jobs.backend.Backend`. If it has settings of its own
in job.yaml, its module `section` has them as `SECTION`, a `lockstep.jobs.spec.types.Section`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING

from lockstep.training.config import settings
from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from .backend import Backend
    from .spec.types import Section

BACKENDS = {
    "local": "lockstep.jobs.local",
    "k8s": "lockstep.jobs.kubernetes",
    "slurm": "lockstep.jobs.slurm",
    "compose": "lockstep.jobs.compose",
}
"""Name → package."""
ALIASES = {"kubernetes": "k8s"}


@functools.cache
def sections() -> dict[str, type[Section]]:
    """Name → settings in job.yaml, of the backends that have some."""
    return {
        name: importlib.import_module(f"{package}.section").SECTION
        for name, package in BACKENDS.items()
        if importlib.util.find_spec(f"{package}.section") is not None
    }


def backend(name: str) -> type[Backend]:
    """The backend of that name; imports only this one. Raises `UserError` for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}{settings.nearest(name, BACKENDS)}")
    found: type[Backend] = importlib.import_module(f"{BACKENDS[name]}.backend").BACKEND
    return found
