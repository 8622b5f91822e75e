"""A folder that we alone can write: what a job is run from, signalled by or unpickled from lies there.

Nobody else may rename on the way there, either. Then what a path names stays what was checked, and can be opened by its path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

import filelock

from lockstep.training.contract import UserError

_MOST_LINKS = 40


def home() -> Path:
    """Where the jobs of this user are kept, a folder a backend. Raises `UserError`."""
    try:
        return Path(os.environ.get("LOCKSTEP_HOME") or Path.home() / ".local/state/lockstep")
    except RuntimeError:  # no HOME, and a user of a number only, as in many containers
        raise UserError("this user has no home folder to keep jobs in: set LOCKSTEP_HOME") from None


def make(folder: Path) -> Path:
    """The folder, made where it is missing, and checked. Raises `UserError`."""
    try:
        _way(folder.absolute().parent, make=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        own(folder)
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
    return folder


def check(folder: Path) -> None:
    """Refuses a folder that somebody else could have put a payload into. Raises `UserError`, `OSError`."""
    _way(folder.absolute().parent)
    own(folder)


def own(folder: Path) -> None:
    """`check` of a folder in one that was checked. Raises `UserError`, `OSError`."""
    found = folder.lstat()
    judge(folder, stat.S_ISDIR(found.st_mode), found.st_uid, stat.S_IMODE(found.st_mode), os.geteuid())


def judge(folder: PurePath, is_folder: bool, owner: int, mode: int, me: int) -> None:
    """`own`, from what is known of a folder, here or elsewhere."""
    if not is_folder:
        raise UserError(
            f"{folder} is not a plain folder (a link?): jobs are run from the files in it; set LOCKSTEP_HOME"
        )
    if owner != me:
        raise UserError(f"{folder} belongs to user {owner}: jobs are run from the files in it; set LOCKSTEP_HOME")
    if mode & 0o077:
        raise UserError(f"{folder} can be changed by other users (mode {mode:o}): chmod 700 it")


def judge_step(folder: PurePath, owner: int, mode: int, me: int, group_is_mine: bool = False) -> None:
    """Refuses a folder on the way in which somebody else could rename what comes next. Raises `UserError`."""
    if owner not in (0, me):
        raise UserError(
            f"{folder} belongs to user {owner}, who can put other jobs in the place of yours: set LOCKSTEP_HOME to a "
            "folder below such as only you and root can write"
        )
    # In a folder with the sticky bit only its owner renames what is somebody else's.
    if mode & 0o022 and not mode & stat.S_ISVTX and (mode & 0o002 or not group_is_mine):
        raise UserError(
            f"{folder} can be changed by other users (mode {mode:o}), who can put other jobs in the place of yours: "
            f"chmod go-w {folder}, or set LOCKSTEP_HOME to a folder below such as only you and root can write"
        )


def _way(folder: Path, make: bool = False) -> None:
    """Judges each folder from / to this one, and each link between them. `make`: those that are missing are made.

    From above: what was judged can be renamed by nobody else while the next one is looked at.
    """
    me, at, left, links = os.geteuid(), Path("/"), list(folder.parts[1:])[::-1], 0
    _step(at, at.lstat(), me)
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        place = at / name
        try:
            found = place.lstat()
        except FileNotFoundError:
            if not make:
                raise
            place.mkdir(mode=0o700, exist_ok=True)
            found = place.lstat()
        if not stat.S_ISLNK(found.st_mode):
            _step(place, found, me)
            at = place
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        judge_step(place, found.st_uid, 0, me)
        target = Path(os.readlink(place))
        at = Path("/") if target.is_absolute() else at
        left += [part for part in target.parts if part != "/"][::-1]


def _step(place: Path, found: os.stat_result, me: int) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    mode = stat.S_IMODE(found.st_mode)
    judge_step(place, found.st_uid, mode, me, bool(mode & 0o020) and _is_mine(found.st_gid, me))


def _is_mine(group: int, me: int) -> bool:
    """Whether it is this user's private group, as many systems give one to each, with a umask of 002."""
    import grp
    import pwd

    try:
        user, named = pwd.getpwuid(me), grp.getgrgid(group)
    except KeyError:
        return False
    return me != 0 and user.pw_gid == group and named.gr_name == user.pw_name and {*named.gr_mem} <= {user.pw_name}


@contextlib.contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """The folder's lock. Raises `UserError`: another command holds it for longer than that, or nothing can be written there."""
    try:
        with filelock.FileLock(make(folder) / ".lock", timeout=seconds):
            yield
    except filelock.Timeout:
        raise UserError(f"{folder} is locked by another lockstep command: wait for it") from None
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
