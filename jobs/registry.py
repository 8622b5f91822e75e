"""The backends: those of this package in a table, those of other packages by their entry points.

A backend is a package with a module `backend`, whose `BACKEND` is a `lockstep.jobs.backend.Backend`. Where it has settings of its
own in job.yaml it has a module `section`, whose `SECTION` is a `lockstep.jobs.spec.types.Section`. Another distribution names
its package under the entry point group `lockstep.backends`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

from lockstep.training.config import settings
from lockstep.training.contract import UserError

from .status import warn

if TYPE_CHECKING:
    from .backend import Backend
    from .spec.types import Section

BUILT_IN = {
    "local": "lockstep.jobs.local",
    "k8s": "lockstep.jobs.kubernetes",
    "slurm": "lockstep.jobs.slurm",
    "compose": "lockstep.jobs.compose",
}
"""Name → package."""
ALIASES = {"kubernetes": "k8s"}
GROUP = "lockstep.backends"


@functools.cache
def packages() -> dict[str, str]:
    """Name → package of all backends, the built-in ones first: another package cannot take their names."""
    found = {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}
    return {**BUILT_IN, **{name: package for name, package in sorted(found.items()) if name not in BUILT_IN}}


@functools.cache
def sections() -> dict[str, type[Section]]:
    """Name → settings in job.yaml, of the backends that have some. One of another package that is broken stops no other."""
    found = {}
    for name, package in packages().items():
        try:
            if importlib.util.find_spec(f"{package}.section") is not None:
                found[name] = importlib.import_module(f"{package}.section").SECTION
        except Exception as error:
            if name in BUILT_IN:
                raise
            warn(f"the settings of the backend {name} ({package}) cannot be read: {error}")
    return found


def backend(name: str) -> type[Backend]:
    """The backend of that name; imports only this one. Raises `UserError` for an unknown name."""
    name = ALIASES.get(name, name)
    if name not in packages():
        raise UserError(f"unknown backend {name!r}{settings.nearest(name, packages())}")
    try:
        found: type[Backend] = importlib.import_module(f"{packages()[name]}.backend").BACKEND
    except Exception as error:
        if name in BUILT_IN:
            raise
        raise UserError(f"the backend {name} ({packages()[name]}) cannot be imported: {error}") from None
    return found
