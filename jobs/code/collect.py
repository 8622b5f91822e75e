"""One read of a folder: the files, their identity and the archive are of the same bytes. What must not travel is refused by name."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import sys
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lockstep.training.contract import UserError
from lockstep.wire import archive
from lockstep.wire.archive import MAX_BYTES, MAX_PACKED, File

from . import listing
from .tree import Changed, Entry, Tree, Unfit, seen

NAMED = 10
"""How many of the largest files an error names."""
_NAMES = {
    ".env*": "a file of environment variables", "*.pem": "a key or a certificate", "id_*": "an SSH key",
    ".netrc": "passwords", "_netrc": "passwords", ".npmrc": "a registry's login", "kubeconfig*": "a cluster's login",
    "*.kubeconfig": "a cluster's login", "credentials*": "credentials",
}  # fmt: skip
"""Pattern of a file's name, in small letters → what such a file is."""
_PATHS = {".kube/config": "a cluster's login", ".docker/config.json": "a registry's login"}
"""The last two parts of a path."""
_HARMLESS = ".example"
"""End of the name of a file with sample values, not real ones."""
OURS = "lockstep"
_AT_START = ("sitecustomize", "usercustomize")
"""Modules that Python imports by itself when it starts, before anything of ours."""
_MODULE = re.compile(r"(?P<name>\w+)(?:\.\w[\w-]*)?\.(?:py|pyc|so|pyd)")
"""`name.py`, `name.cpython-311-x86_64-linux-gnu.so`."""
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024
"""No pointer is larger."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Code that can travel."""

    files: list[File]
    """Sorted by path."""
    identity: str
    packed: bytes
    """The archive."""

    @property
    def paths(self) -> set[str]:
        return {file.path for file in self.files}

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
        _check_name(path, allow)
    _check_names(paths)
    try:
        with Tree(folder) as tree:
            found, sizes = _files(tree, paths)
    except OSError as error:
        raise UserError(f"code: {folder} cannot be read: {error.strerror}") from None
    for file in found:
        if len(file.data) <= _LFS_BYTES and file.data.startswith(_LFS):
            raise UserError(
                f"code: {file.path} is a pointer of git-lfs, not the file: git lfs pull, or name it in {listing.IGNORE_FILE}"
            )
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


def _found(tree: Tree, path: str) -> Entry:
    try:
        return tree.find(path)
    except Unfit as error:
        raise UserError(f"code: {path} {error}: name it in {listing.IGNORE_FILE}") from None


def _check_links(found: dict[str, Entry]) -> None:
    """A link must not bring along what does not travel by itself: what git ignores, `.git/config`, the folder of jobs."""
    for path, (target, _) in found.items():
        if target not in found:
            raise UserError(
                f"code: {path} is a link to {target}, which does not travel: name it in {listing.IGNORE_FILE}"
            )


def _read(tree: Tree, path: str, found: Entry) -> File:
    try:
        return File(path, bool(found.status.st_mode & 0o100), tree.read(found))
    except Changed:
        raise _changed(path) from None
    except OSError as error:
        raise UserError(f"code: {path} cannot be read: {error.strerror}") from None


def _same(tree: Tree, path: str, before: Entry) -> bool:
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


def _check_name(path: str, allow: Collection[str]) -> None:
    """Raises `UserError` for a file whose name says that it holds secrets."""
    if path in allow:
        return
    lower = path.lower()
    name = lower.rpartition("/")[2]
    if name.endswith(_HARMLESS):
        return
    found = [(rule, kind) for rule, kind in _NAMES.items() if fnmatch.fnmatchcase(name, rule)]
    found += [(rule, kind) for rule, kind in _PATHS.items() if f"/{lower}".endswith(f"/{rule}")]
    for rule, kind in found[:1]:
        raise UserError(
            f"code: {path} looks like {kind} (its name: {rule}): name it in {listing.IGNORE_FILE}, or, if it is not a secret, in "
            f"code.allow: [{path}]"
        )


def _check_names(paths: Collection[str]) -> None:
    """Raises `UserError` for two names that some file systems take for one, and for modules that hide others."""
    spelled: dict[tuple[str, str], str] = {}
    """Folder, and a name in it as such a file system compares it → the name. Each folder is looked at once, however deep it lies."""
    looked_at = {""}
    for path in sorted(paths):
        rest = path
        while rest:
            folder, _, name = rest.rpartition("/")
            known = spelled.setdefault((folder, unicodedata.normalize("NFC", name).casefold()), name)
            if known != name:
                first = f"{folder}/{known}" if folder else known
                raise UserError(f"code: {first} and {rest} differ only in case or spelling: rename one of them")
            if folder in looked_at:
                break
            looked_at.add(folder)
            rest = folder
        _check_module(path, path.split("/"))


def _check_module(path: str, parts: list[str]) -> None:
    """A module or a package at the top of the code comes first on Python's path."""
    match = _MODULE.fullmatch(parts[min(len(parts), 2) - 1])
    if match is None or len(parts) > 2:
        return
    name = match["name"] if len(parts) == 1 else parts[0]
    if name == OURS:
        raise UserError(
            f"code: {path} would hide the package {name} of Lockstep: rename it, or name it in {listing.IGNORE_FILE}"
        )
    # A folder without __init__.py hides nothing.
    if name in {*sys.stdlib_module_names, *_AT_START} and (len(parts) == 1 or match["name"] == "__init__"):
        raise UserError(
            f"code: {path} would hide the standard module {name}: rename it, or name it in {listing.IGNORE_FILE}"
        )
