"""From a spec that names a folder to one that names what lies in it now."""

from __future__ import annotations

from pathlib import Path

from lockstep.jobs.code import collect, store
from lockstep.jobs.code.collect import Bundle
from lockstep.jobs.spec.code import Code
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError


def look(spec: JobSpec) -> tuple[JobSpec, Bundle | None]:
    """The spec with the identity of its code, and the code. Keeps nothing.

    Returns:
        None in place of the code where there is none, or where the spec names a copy that is kept.

    Raises:
        UserError: something that must not travel, or a recipe that does not.
    """
    if spec.code is None or (spec.code.hash is not None and spec.code.packed):
        return spec, None
    if spec.code.hash is not None:
        return _kept(spec, spec.code.hash), None
    bundle = collect.collect(Path(spec.code.path), frozenset(spec.code.allow))
    recipe = spec.recipe or ""
    own = recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_absolute()
    if own and Path(recipe).as_posix() not in {file.path for file in bundle.files}:
        raise UserError(
            f"recipe {recipe} is not part of the code: name a file inside the code's folder, by its path from there"
        )
    return _pinned(spec, bundle), bundle


def keep(spec: JobSpec) -> JobSpec:
    """`look`, and the code is kept for the job. Raises `UserError`, also where an identity is of no copy that is kept."""
    pinned, bundle = look(spec)
    if bundle is not None:
        store.keep(bundle)
    elif pinned.code is not None and pinned.code.hash is not None:
        pinned = _kept(pinned, pinned.code.hash)
    return pinned


def keep_all(specs: list[JobSpec]) -> list[JobSpec]:
    """`keep` for the runs of a sweep: one read of each folder, so that all of them run the same."""
    known: dict[str, Code | None] = {}
    found = []
    for spec in specs:
        key = "" if spec.code is None else spec.code.model_dump_json()
        if key not in known:
            known[key] = keep(spec).code
        found.append(spec.model_copy(update={"code": known[key]}))
    return found


def _kept(spec: JobSpec, identity: str) -> JobSpec:
    """With what the copy of that identity says. Raises `UserError` where none is kept."""
    return spec.model_copy(update={"code": Code(hash=identity, packed=len(store.packed(identity)))})


def _pinned(spec: JobSpec, bundle: Bundle) -> JobSpec:
    # The cluster need not know where the code was, and the job is the same job wherever it was.
    return spec.model_copy(update={"code": Code(hash=bundle.identity, packed=len(bundle.packed))})
