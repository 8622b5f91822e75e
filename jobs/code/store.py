"""The copies of code that jobs run from: $LOCKSTEP_HOME/code/IDENTITY.tar.gz, and IDENTITY/, unpacked and read-only.

A copy gets its name when it is complete, and is never changed: what was submitted is what runs. A spec that names a folder becomes
one that names the copy of what lies in it now.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import UserError
from lockstep.wire import archive

from .. import records
from ..lint import missing_script
from ..manifest import get
from ..spec.model import Code, JobSpec
from ..status import warn
from .collect import Bundle, collect

FOLDER = "code"
KEPT_SECONDS = 7 * 86400
"""How long a copy is kept that no job of this machine names."""


def home() -> Path:
    """`$LOCKSTEP_HOME/code`; for SLURM it must lie on storage that the nodes share."""
    return records.home().absolute() / FOLDER


def keep(identity: str, packed: bytes) -> None:
    """Keeps the archive, in the place of one that was damaged. Raises `UserError`."""
    place = records.make(home()) / f"{archive.check_identity(identity)}.tar.gz"
    try:
        if _is_whole(place, identity):
            os.utime(place)  # it is wanted again
        else:
            files.replace(place, packed)
    except OSError as error:
        raise UserError(f"cannot keep the code in {place.parent}: {error.strerror}; set LOCKSTEP_HOME") from None
    _remove_unused()


def _is_whole(place: Path, identity: str) -> bool:
    try:
        archive.read(files.read(place, archive.MAX_PACKED), identity)
    except (OSError, UserError):
        return False
    return True


def packed(identity: str) -> bytes:
    """The archive of a copy. Raises `UserError` where it is not kept, or damaged."""
    place = home() / f"{archive.check_identity(identity)}.tar.gz"
    try:
        records.check(place.parent)
        data = files.read(place, archive.MAX_PACKED)
    except OSError as error:
        raise UserError(
            f"the code {identity[:12]} is not stored in {place.parent} ({error.strerror}): submit it from its folder"
        ) from None
    archive.read(data, identity)  # a disk, or a hand, may have changed it
    return data


def folder(identity: str) -> Path:
    """Where the code of that identity lies unpacked."""
    return home() / identity


def unpacked(identity: str) -> Path:
    """The unpacked copy, made where it is missing. One that was changed since is renamed. Raises `UserError`."""
    target = folder(identity)
    data = packed(identity)
    if os.path.lexists(target) and not archive.holds(target, identity):
        aside = target.with_name(f".{identity}.changed.{os.getpid()}")
        warn(f"{target} was changed since it was written: it is moved to {aside.name}")
        try:
            target.rename(aside)
        except OSError as error:
            raise UserError(f"{target} was changed, and cannot be moved away: {error.strerror}") from None
    return target if target.exists() else archive.unpack(data, identity, target)


def _remove_unused() -> None:
    """Copies that no job names, and what killed commands have left, go after a week."""
    old = time.time() - KEPT_SECONDS
    jobs = (files.read_json(path) for path in records.home().glob("*/*/job.json"))
    named = {str(get(job, "spec", "code", "hash")) for job in jobs}
    for place in home().iterdir():
        identity = place.name.removesuffix(".tar.gz")
        with contextlib.suppress(OSError):
            if identity in named or place.lstat().st_mtime > old:
                continue
            if place.is_dir():
                archive.remove(place)
            else:
                place.unlink()


def pinned(spec: JobSpec) -> tuple[JobSpec, Bundle | None]:
    """The spec with the identity of its code, and the code. Keeps nothing.

    Returns:
        None in place of the code where there is none, or where the spec names a copy that is kept.

    Raises:
        UserError: something that must not travel, or a recipe that does not.
    """
    if spec.code is None or (spec.code.hash is not None and spec.code.packed):
        return spec, None
    if spec.code.hash is not None:
        return _named(spec, spec.code.hash), None
    bundle = collect(Path(spec.code.path))
    recipe = spec.recipe or ""
    own = recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_absolute()
    if own and Path(recipe).as_posix() not in {file.path for file in bundle.files}:
        raise UserError(
            f"recipe {recipe} is not part of the code: name a file inside the code's folder, by its path from there"
        )
    return _pinned(spec, bundle), bundle


def checked(spec: JobSpec) -> tuple[JobSpec, Bundle | None]:
    """`pinned`, for what is to be submitted: also raises `UserError` where the code lacks the command's script."""
    found, bundle = pinned(spec)
    if bundle is not None and (missing := missing_script(spec, bundle.paths)):
        raise UserError(missing)
    return found, bundle


def kept(spec: JobSpec) -> JobSpec:
    """`checked`, and the code is kept for the job. Raises `UserError`, also where an identity is of no copy that is kept."""
    found, bundle = checked(spec)
    if bundle is not None:
        keep(bundle.identity, bundle.packed)
    elif found.code is not None and found.code.hash is not None:
        found = _named(found, found.code.hash)
    return found


def all_kept(specs: list[JobSpec]) -> list[JobSpec]:
    """`kept` for the runs of a sweep: one read of each folder, so that all of them run the same."""
    known: dict[str, Code | None] = {}
    found = []
    for spec in specs:
        key = "" if spec.code is None else spec.code.model_dump_json()
        if key not in known:
            known[key] = kept(spec).code
        found.append(spec.model_copy(update={"code": known[key]}))
    return found


def _named(spec: JobSpec, identity: str) -> JobSpec:
    """With what the copy of that identity says. Raises `UserError` where none is kept."""
    return spec.model_copy(update={"code": Code(hash=identity, packed=len(packed(identity)))})


def _pinned(spec: JobSpec, bundle: Bundle) -> JobSpec:
    # The cluster need not know where the code was, and the job is the same job wherever it was.
    return spec.model_copy(update={"code": Code(hash=bundle.identity, packed=len(bundle.packed))})
