"""The code of a job: its identity, its archive, and safe unpacking.

`jobs` packs the code on the submitting machine, and the launcher unpacks it in the container. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import UserError

MAX_FILES = 10_000
MAX_BYTES = 64 << 20
"""Most bytes of all unpacked files together."""
MAX_PACKED = 8 << 20
"""Most bytes of the archive."""
MAX_PATH = 1024
"""Most bytes of a file's path within the code."""
DERIVED = "__pycache__"
"""Files that Python writes next to a module. They are not part of the code; root may write them into a read-only copy."""
_TAR_LIMIT = MAX_BYTES + 4096 * MAX_FILES
"""Most bytes of the uncompressed archive: the files, and a few headers for each."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the code."""

    path: str
    """The relative path, with `/`."""
    executable: bool
    data: bytes


def identity(entries: Iterable[File]) -> str:
    """Returns 64 hex digits over the sorted paths, the executable bits and the bytes, and over nothing else."""
    digest = hashlib.sha256()
    for file in sorted(entries, key=attrgetter("path")):
        about = f"{file.path}\0{'x' if file.executable else '-'}\0{len(file.data)}\0"
        digest.update(about.encode())
        digest.update(file.data)
    return digest.hexdigest()


def pack(entries: Iterable[File]) -> bytes:
    """Returns a compressed archive: the same files give the same bytes, with the same zlib."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for file in sorted(entries, key=attrgetter("path")):
            member = tarfile.TarInfo(file.path)
            member.size, member.mode = len(file.data), 0o755 if file.executable else 0o644
            tar.addfile(member, io.BytesIO(file.data))
    compressor = zlib.compressobj(6, wbits=31)  # gzip without a time in its header
    return compressor.compress(plain.getvalue()) + compressor.flush()


def read(data: bytes, expected: str) -> list[File]:
    """Returns the files of an archive, after a check that their identity is `expected`.

    Raises:
        UserError: the data has a link, a device, a path outside the folder, or too many bytes; has other files; or is no archive.
    """
    with files.reading("the code's archive", then=": submit the job again"):
        unzip = zlib.decompressobj(wbits=31)
        plain = unzip.decompress(data, _TAR_LIMIT)
        if unzip.unconsumed_tail:
            raise UserError(f"the code's archive holds more than {_TAR_LIMIT >> 20} MiB: it was not made by Lockstep")
        if not unzip.eof:
            raise UserError("the code's archive is cut off: submit the job again")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            entries = list(_members(tar))
    if (other := identity(entries)) != expected:
        raise UserError(f"the archive holds the code {other[:12]}, expected {expected[:12]}: submit the job again")
    return entries


def _members(tar: tarfile.TarFile) -> Iterator[File]:
    for member in tar:
        if not member.isreg() or member.issparse():
            raise UserError(
                f"the code's archive holds {member.name[:MAX_PATH]!r}, which is not a plain file: it was not made by Lockstep"
            )
        check_path(member.name)
        content = tar.extractfile(member)
        assert content is not None
        yield File(member.name, bool(member.mode & 0o100), content.read())


def check_path(path: str) -> None:
    """Raises `UserError` for a path that may not be unpacked."""
    parts = path.split("/")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise UserError(f"{path!r} is not UTF-8: give it another name") from None
    if not path or size > MAX_PATH or "\0" in path or {"", ".", ".."} & set(parts):
        raise UserError(f"{path[:MAX_PATH]!r} is not a path inside the code")


def unpack(data: bytes, expected: str, target: Path) -> Path:
    """Writes the files of an archive into a new read-only folder, which gets its name when it is complete. Returns the folder.

    If another process was faster, its folder must hold the same code.

    Raises:
        UserError: the archive is damaged or holds other code, the folder cannot be written, or the name is taken by something else.
    """
    entries = read(data, expected)
    temporary: Path | None = None
    try:
        # In a folder that all users write to, another user may take a predictable name first, for a link to our files.
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        _write(entries, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            remove(temporary)
        if not isinstance(error, OSError):
            raise
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise UserError(f"cannot unpack the code to {target}: {error.strerror}") from None
        if not holds(target, expected):
            raise UserError(f"{target} exists and holds something else: remove it") from None
    return target


def _write(entries: Iterable[File], folder: Path) -> None:
    """Writes the files without tarfile, which has no safe filter before Python 3.11.4; Debian 12 has 3.11.2."""
    folders = {folder}
    for file in entries:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        folders.update(parent for parent in path.parents if parent.is_relative_to(folder))
        with path.open("xb") as stream:
            stream.write(file.data)
        path.chmod(0o555 if file.executable else 0o444)
    for inner in sorted(folders, reverse=True):
        inner.chmod(0o555)


def holds(folder: Path, expected: str) -> bool:
    """Returns whether an unpacked folder belongs to this user, and holds exactly the code of that identity."""
    try:
        status = folder.lstat()  # one call: in a folder that all users write to, no other user can replace ours
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        return identity(_unpacked(folder)) == expected
    except OSError:
        return False


def _unpacked(folder: Path) -> Iterator[File]:
    left = MAX_BYTES
    for parent, inner, names in os.walk(folder, onerror=_raised):
        inner[:] = [name for name in inner if name != DERIVED]
        if any(os.path.islink(os.path.join(parent, name)) for name in inner + names):
            raise OSError(errno.ELOOP, "it holds a link", parent)
        for name in names:
            path = Path(parent, name)
            data = files.read(path, left)
            left -= len(data)
            yield File(path.relative_to(folder).as_posix(), bool(path.stat().st_mode & 0o100), data)


def _raised(error: OSError) -> None:
    raise error


def remove(folder: Path) -> None:
    """Removes an unpacked folder of this user, which is read-only."""
    for parent, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(parent, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def check_identity(text: str) -> str:
    """Returns the text. Raises `UserError` unless it is an identity."""
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise UserError(f"{text!r} is not the identity of code: expected 64 hex digits")
    return text
