"""The copies of code that jobs run from: $LOCKSTEP_HOME/code/IDENTITY.tar.gz, and IDENTITY/, unpacked and read-only.

A copy gets its name when it is complete, and is never changed: what was submitted is what runs.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from lockstep.jobs import private
from lockstep.jobs.code.collect import Bundle
from lockstep.jobs.manifest import get
from lockstep.jobs.terminal import warn
from lockstep.training import files
from lockstep.training.contract import UserError
from lockstep.wire import archive

FOLDER = "code"
KEPT_SECONDS = 7 * 86400
"""How long a copy is kept that no job of this machine names."""


def home() -> Path:
    """`$LOCKSTEP_HOME/code`; for SLURM it must lie on storage that the nodes share."""
    return private.home().absolute() / FOLDER


def keep(bundle: Bundle) -> None:
    """Keeps the archive. Raises `UserError`."""
    place = private.make(home()) / f"{bundle.identity}.tar.gz"
    try:
        if place.exists():
            os.utime(place)  # it is wanted again
        else:
            files.replace(place, bundle.packed)
    except OSError as error:
        raise UserError(f"cannot keep the code in {place.parent}: {error.strerror}; set LOCKSTEP_HOME") from None
    _remove_unused()


def packed(identity: str) -> bytes:
    """The archive of a copy. Raises `UserError` where it is not kept, or damaged."""
    place = home() / f"{archive.check_identity(identity)}.tar.gz"
    try:
        private.check(place.parent)
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
    found = archive.read(packed(identity), identity)
    if os.path.lexists(target) and not archive.holds(target, identity):
        aside = target.with_name(f".{identity}.changed.{os.getpid()}")
        warn(f"{target} was changed since it was written: it is moved to {aside.name}")
        try:
            target.rename(aside)
        except OSError as error:
            raise UserError(f"{target} was changed, and cannot be moved away: {error.strerror}") from None
    return target if target.exists() else archive.unpack(found, target)


def _remove_unused() -> None:
    """Copies that no job names, and what killed commands have left, go after a week."""
    old = time.time() - KEPT_SECONDS
    records = (files.read_json(path) for path in private.home().glob("*/*/job.json"))
    named = {str(get(record, "spec", "code", "hash")) for record in records}
    for place in home().iterdir():
        identity = place.name.removesuffix(".tar.gz")
        with contextlib.suppress(OSError):
            if identity in named or place.lstat().st_mtime > old:
                continue
            if place.is_dir():
                archive.remove(place)
            else:
                place.unlink()
