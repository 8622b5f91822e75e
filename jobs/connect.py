"""From a backend's name, the flags and the spec to the backend."""

from __future__ import annotations

import functools
from typing import Any

from lockstep.jobs import registry
from lockstep.jobs.backend import Backend
from lockstep.jobs.cluster import Cluster
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError


def cluster(name: str, command: str) -> type[Cluster]:
    """A backend that renders. Raises `UserError` where `command` has nothing to do for it."""
    found = registry.backend(name)
    if not issubclass(found, Cluster):
        others = [other for other in registry.packages() if issubclass(registry.backend(other), Cluster)]
        raise UserError(f"{command} knows {', '.join(others[:-1])} and {others[-1]}, got {name!r}")
    return found


def connect(name: str, spec: JobSpec | None = None, **place: str | None) -> Backend:
    """The backend, ready for questions: where `place` (the flags) says, or else the spec.

    Raises:
        UserError: an unknown name, a flag that belongs to another backend, or no credentials.
    """
    found = registry.backend(name)
    return found.connect(**where(found, spec, **place))


def where(found: type[Backend], spec: JobSpec | None, **place: str | None) -> dict[str, str | None]:
    """What `found.connect` takes. Raises `UserError` for a flag that belongs to another backend."""
    for flag, value in place.items():
        if value is not None and flag not in found.places:
            owner = next(other for name in registry.packages() if flag in (other := registry.backend(name)).places)
            flags = " and ".join(f"--{name}" for name in owner.places)
            verb = "is" if len(owner.places) == 1 else "are"
            raise UserError(f"{flags} {verb} for {owner.name}, not for {found.name}")
    said = {flag: setting(spec, name) for flag, name in found.places.items()} if spec is not None else {}
    return {flag: place.get(flag) or said.get(flag) for flag in found.places}


def setting(spec: JobSpec, name: str) -> Any:
    """A setting by its dotted name."""
    return functools.reduce(getattr, name.split("."), spec)
