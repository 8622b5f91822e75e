"""One read of a folder: the files, their identity and the archive are of the same bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lockstep.jobs.code import listing, refusals
from lockstep.jobs.code.tree import Changed, Found, Tree, Unfit, seen
from lockstep.training.contract import UserError
from lockstep.wire import archive
from lockstep.wire.archive import MAX_BYTES, MAX_PACKED, File

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
    paths = [path for path in listing.files_of(folder) if not _links_to_ours(folder, path)]
    for path in paths:
        _check_path(path)
        refusals.check_name(path, allow)
    refusals.check_names(paths)
    try:
        with Tree(folder) as tree:
            found, sizes = _files(tree, paths)
    except OSError as error:
        raise UserError(f"code: {folder} cannot be read: {error.strerror}") from None
    for file in found:
        refusals.check_content(file.path, file.data, allow)
    packed = archive.pack(found)
    if len(packed) > MAX_PACKED:
        raise _too_large(sizes, f"{len(packed)} bytes in an archive", f"{MAX_PACKED >> 20} MiB")
    return Bundle(found, archive.identity(found), packed)


def _links_to_ours(folder: Path, path: str) -> bool:
    """`lockstep/training` and `lockstep/jobs` in a fork of Lockstep: the folders that they lead to travel by themselves."""
    with contextlib.suppress(OSError, ValueError):
        package, name = path.split("/")[-2:]
        return package == "lockstep" and name in ("training", "jobs") and os.readlink(folder / path) == f"../{name}"
    return False


def _files(tree: Tree, paths: list[str]) -> tuple[list[File], dict[str, int]]:
    """The files, all of one moment, and their sizes."""
    found = {path: _found(tree, path) for path in paths}
    _check_links(found)
    sizes = {path: status.st_size for path, (_, status) in found.items()}
    if sum(sizes.values()) > MAX_BYTES:
        raise _too_large(sizes, f"{sum(sizes.values())} bytes", f"{MAX_BYTES >> 20} MiB")
    read = [_read(tree, path, found[path]) for path in paths]
    for path in paths:
        if not _same(tree, path, found[path]):  # all files must be of one moment: a mixture may never have existed
            raise _changed(path)
    return read, sizes


def _check_path(path: str) -> None:
    try:
        archive.check_path(path)
    except UserError as error:
        raise UserError(f"code: {error}") from None


def _found(tree: Tree, path: str) -> Found:
    try:
        return tree.find(path)
    except Unfit as error:
        raise UserError(f"code: {path} {error}: name it in {listing.IGNORE_FILE}") from None


def _check_links(found: dict[str, Found]) -> None:
    """A link must not bring along what does not travel by itself: what git ignores, `.git/config`, the folder of jobs."""
    for path, (target, _) in found.items():
        if target not in found:
            raise UserError(
                f"code: {path} is a link to {target}, which does not travel: name it in {listing.IGNORE_FILE}"
            )


def _read(tree: Tree, path: str, found: Found) -> File:
    try:
        return File(path, bool(found.status.st_mode & 0o100), tree.read(found))
    except Changed:
        raise _changed(path) from None
    except OSError as error:
        raise UserError(f"code: {path} cannot be read: {error.strerror}") from None


def _same(tree: Tree, path: str, before: Found) -> bool:
    with contextlib.suppress(Unfit):
        now = tree.find(path)
        return now.path == before.path and seen(now.status) == seen(before.status)
    return False


def _changed(path: str) -> UserError:
    return UserError(f"code: {path} was changed while it was read: submit again when nothing writes to it")


def _too_large(sizes: dict[str, int], found: str, limit: str) -> UserError:
    largest = sorted(sizes, key=lambda path: (-sizes[path], path))[:NAMED]
    told = ", ".join(f"{path} ({sizes[path]})" for path in largest)
    return UserError(
        f"code: {found}, at most {limit} can be sent; the largest files: {told}; name what is not needed in {listing.IGNORE_FILE}"
    )
