"""A folder that we alone can write: what a job is run from, signalled by or unpickled from lies there."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath

from training.contract import UserError


def home() -> Path:
    """Where the jobs of this user are kept, a folder a backend."""
    return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep")


def make(folder: Path) -> Path:
    """The folder, made where it is missing, and checked. Raises `UserError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check(folder)
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
    return folder


def check(folder: Path) -> None:
    """Refuses a folder that somebody else could have put a payload into. Raises `UserError`, `OSError`."""
    found = folder.lstat()
    judge(folder, stat.S_ISDIR(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode), os.geteuid())


def judge(folder: PurePath, is_folder: bool, owner: int, mode: int, me: int) -> None:
    """`check`, from what is known of a folder, here or elsewhere."""
    if not is_folder:
        raise UserError(
            f"{folder} is not a plain folder (a link?): jobs are run from the files in it; set LOCKSTEP_HOME"
        )
    if owner != me:
        raise UserError(f"{folder} belongs to user {owner}: jobs are run from the files in it; set LOCKSTEP_HOME")
    if mode & 0o077:
        raise UserError(f"{folder} can be changed by other users (mode {mode:o}): chmod 700 it")
