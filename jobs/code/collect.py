"""One read of a folder: the files, their identity and the archive are of the same bytes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from jobs.code import listing, refusals
from training.contract import UserError
from training.launch import archive
from training.launch.archive import MAX_BYTES, MAX_PACKED, File

NAMED = 10
"""How many of the largest files an error names."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Code that can travel."""

    files: list[File]
    """Sorted by path."""
    identity: str
    packed: bytes
    """The archive."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files)

    def lines(self) -> list[str]:
        """What travels, for people: a line a file, then the sum and the identity."""
        rows = [f"{len(file.data):>9}  {file.path}{' (executable)' if file.executable else ''}" for file in self.files]
        total = f"{len(self.files)} files, {self.size} bytes, {len(self.packed)} packed"
        return [*rows, f"code {self.identity}: {total}"]


def collect(folder: Path, allow: Collection[str] = ()) -> Bundle:
    """What of a folder travels. Everything that must not is refused here, before anything is sent.

    Args:
        allow: paths within the folder that may look like a secret.

    Raises:
        UserError: with the path and the rule.
    """
    paths = listing.files_of(folder)
    for path in paths:
        _check_path(path)
        refusals.check_name(path, allow)
    refusals.check_names(paths)
    sizes = {path: _status(folder, path).st_size for path in paths}
    if sum(sizes.values()) > MAX_BYTES:
        raise _too_large(sizes, f"{sum(sizes.values())} bytes", f"{MAX_BYTES >> 20} MiB")
    read = [_read(folder, path) for path in paths]
    for path, (_, seen) in zip(paths, read):
        if _seen(_status(folder, path)) != seen:  # all files must be of one moment: a mixture may never have existed
            raise _changed(path)
    found = [file for file, _ in read]
    for file in found:
        refusals.check_content(file.path, file.data, allow)
    packed = archive.pack(found)
    if len(packed) > MAX_PACKED:
        raise _too_large(sizes, f"{len(packed)} bytes in an archive", f"{MAX_PACKED >> 20} MiB")
    return Bundle(found, archive.identity(found), packed)


def _check_path(path: str) -> None:
    try:
        archive.check_path(path)
    except UserError as error:
        raise UserError(f"code: {error}") from None


def _status(folder: Path, path: str) -> os.stat_result:
    """Of the file, behind a link within the folder. Raises `UserError` for what cannot travel."""
    place = folder / path
    try:
        if place.is_symlink():
            target = place.resolve(strict=True)
            if not target.is_relative_to(folder.resolve()):
                raise UserError(
                    f"code: {path} is a link that leads out of the folder: name it in {listing.IGNORE_FILE}"
                )
            if target.is_dir():
                raise UserError(f"code: {path} is a link to a folder: name it in {listing.IGNORE_FILE}")
        status = place.stat()
    except (OSError, RuntimeError) as error:  # before Python 3.13 links in a circle are a RuntimeError
        dangling = (
            " is a link to nothing" if place.is_symlink() else f" cannot be read ({getattr(error, 'strerror', '')})"
        )
        raise UserError(f"code: {path}{dangling}: name it in {listing.IGNORE_FILE}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"code: {path} is not a regular file (a device, a pipe or a socket): name it in {listing.IGNORE_FILE}"
        )
    return status


def _seen(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode


def _read(folder: Path, path: str) -> tuple[File, tuple[int, ...]]:
    before = _status(folder, path)
    try:
        descriptor = os.open((folder / path).resolve(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            data = file.read(before.st_size + 1)
            after = os.fstat(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise _changed(path) from None
        raise UserError(f"code: {path} cannot be read: {error.strerror}") from None
    if _seen(before) != _seen(after) or len(data) != after.st_size:
        raise _changed(path)
    return File(path, bool(after.st_mode & 0o100), data), _seen(after)


def _changed(path: str) -> UserError:
    return UserError(f"code: {path} was changed while it was read: submit again when nothing writes to it")


def _too_large(sizes: dict[str, int], found: str, limit: str) -> UserError:
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:NAMED]
    told = ", ".join(f"{path} ({sizes[path]})" for path in largest)
    return UserError(
        f"code: {found}, at most {limit} can be sent; the largest files: {told}; name what is not needed in {listing.IGNORE_FILE}"
    )
