"""A folder that somebody else may write, read by descriptors.

A path that was checked and is opened again may lead elsewhere by then. So the folder is opened once, each step of a path is
taken from the descriptor of the step before, and a link is followed by hand: it cannot lead out.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

from lockstep.training.contract import UserError

_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | os.O_CLOEXEC | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0)
_MOST_STEPS = 200
"""Behind a link, those of further links among them. Links in a circle would never end."""
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
"""What a link is to `O_NOFOLLOW`, with `O_DIRECTORY` and without."""


class Unfit(Exception):
    """What is wrong with a file, to be put behind its path."""


class Changed(Exception):
    """It is another one than before."""


class Entry(NamedTuple):
    """Where a file is, behind all links."""

    path: str
    status: os.stat_result


def seen(status: os.stat_result) -> tuple[int, ...]:
    """What differs when a file was changed or replaced."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode


def lines_of(folder: Path, path: str, limit: int) -> bytes:
    """What a file says that lies in the folder, b"" where there is none. Raises `UserError`."""
    place = folder / path
    if not os.path.lexists(place):
        return b""
    try:
        with Tree(folder) as tree:
            found = tree.find(path)
            if found.status.st_size > limit:
                raise UserError(f"code: {place} has {found.status.st_size} bytes, at most {limit} are read")
            return tree.read(found)
    except Unfit as error:
        raise UserError(f"code: {place} {error}: put its lines into a file of that name") from None
    except Changed:
        raise UserError(f"code: {place} was changed while it was read: submit again") from None
    except OSError as error:
        raise UserError(f"code: cannot read {place}: {error.strerror}") from None


class Tree:
    """Files of a folder, by their paths within it."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError`."""
        self._root = os.open(folder, _FOLDER)
        self._names = [Path(os.path.realpath(folder)).parts, folder.absolute().parts]
        self._at: list[str] = []
        self._open: list[int] = []
        """The folders on the way to the last file, each opened in the one before: the next file is often in the same folder."""

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self._enter([])
        os.close(self._root)

    def find(self, path: str) -> Entry:
        """A regular file, or the one that a link leads to. Raises `Unfit` for anything else."""
        try:
            *at, name = path.split("/")
            folder = self._enter(at)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                raise Unfit("lies behind a link, not in a folder of the code") from None
            raise Unfit(f"cannot be read ({error.strerror})") from None
        behind = False
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if behind := stat.S_ISLNK(status.st_mode):
                at, status = self._follow([*at, name])
                name = at.pop() if at else "."
        except OSError as error:
            if behind and error.errno in (*_NO_FOLDER, errno.ENOENT):
                raise Unfit("is a link to nothing") from None
            raise Unfit(f"cannot be read ({error.strerror})") from None
        if behind and stat.S_ISDIR(status.st_mode):
            raise Unfit("is a link to a folder")
        if not stat.S_ISREG(status.st_mode):
            raise Unfit("is not a regular file (a device, a pipe or a socket)")
        return Entry("/".join([*at, name]), status)

    def read(self, found: Entry) -> bytes:
        """The content of a file that was found, and is still the same.

        Raises:
            Changed: it is not.
            OSError: it cannot be read.
        """
        *at, name = found.path.split("/")
        try:
            descriptor = os.open(name, _FILE, dir_fd=self._enter(at))
        except OSError as error:
            if error.errno in (*_NO_FOLDER, errno.ENOENT):
                raise Changed from None
            raise
        with open(descriptor, "rb") as file:
            if seen(os.fstat(descriptor)) != seen(found.status):
                raise Changed
            data = file.read(found.status.st_size + 1)
            after = os.fstat(descriptor)
        if seen(after) != seen(found.status) or len(data) != after.st_size:
            raise Changed
        return data

    def _enter(self, at: list[str]) -> int:
        """The descriptor of a folder; no step to it is a link. Raises `OSError`."""
        if at != self._at:  # compared as a whole: a path may have hundreds of steps, and a folder thousands of files
            same = next(
                (n for n, (old, new) in enumerate(zip(self._at, at)) if old != new), min(len(self._at), len(at))
            )
            while len(self._open) > same:
                os.close(self._open.pop())
                self._at.pop()
            for name in at[same:]:
                self._open.append(
                    os.open(name, _FOLDER | _NOFOLLOW, dir_fd=self._open[-1] if self._open else self._root)
                )
                self._at.append(name)
        return self._open[-1] if self._open else self._root

    def _follow(self, link: list[str]) -> tuple[list[str], os.stat_result]:
        """Where a link leads to within the folder, by way of no other link. Raises `OSError`, and `Unfit` where it leads out."""
        at, left = link[:-1], link[-1:]
        status = os.fstat(self._enter(at))
        for _ in range(_MOST_STEPS):
            if not left:
                return at, status
            name = left.pop()
            if name == "..":
                at, left = (at[:-1], left) if at else ([], self._back(left))
                status = os.fstat(self._enter(at))
                continue
            folder = self._enter(at)
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISLNK(status.st_mode):
                at = [*at, name]
                continue
            target = Path(os.readlink(name, dir_fd=folder))
            parts = target.parts
            if target.is_absolute():
                at, parts = [], self._within(parts)
            left += parts[::-1]
            status = os.fstat(self._enter(at))
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _back(self, left: list[str]) -> list[str]:
        """What is left to go of a path that has left the folder upwards, if it comes back: `../own/a.py`."""
        outside = list(self._names[0][:-1])
        left = left[:]
        while left and left[-1] == "..":
            left.pop()
            outside = outside[:-1] if len(outside) > 1 else outside
        return list(self._within((*outside, *left[::-1])))[::-1]

    def _within(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        for names in self._names:
            if parts[: len(names)] == names:
                return parts[len(names) :]
        raise Unfit("is a link that leads out of the folder")
