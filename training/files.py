"""Writing files so that a crash leaves the old content or the new, never half of it.

All writes of durable files go through these few functions, by their module name. The fault tests replace them one by one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .contract import UserError, printable


def keep_out_others() -> None:
    """Sets the umask, so that other users cannot change what this process and its children write: folders 0775, files 0664."""
    os.umask(os.umask(0o022) | 0o002)


def write_all(descriptor: int, data: Any) -> None:
    """Writes all bytes of a buffer. Raises `OSError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def fsync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def _new(path: Path) -> int:
    """Returns the descriptor of a file that was not there. Raises `OSError` where something is, a link among it."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def write_durable(path: Path, data: bytes) -> None:
    """Writes a new file, whose content is on the disk when this returns. Raises `OSError`."""
    with open(_new(path), "wb", buffering=0) as file:
        write_all(file.fileno(), data)
        fsync(file.fileno())


def append(path: Path, entry: Any) -> None:
    """Appends an entry to a file of JSON lines. A line that a kill has cut off is ended first. Raises `OSError`, for a link too."""
    line = json_text(entry).encode() + b"\n"
    with open(path, "ab+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
        torn = file.seek(0, os.SEEK_END) > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        file.write(b"\n" * torn + line)


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns JSON that every parser reads: NaN and infinity, which JSON does not have, become null."""
    try:
        return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, ensure_ascii=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yields a name next to `path`. The file or folder that the block makes there replaces `path` at once when the block ends.

    The name is random, so that no other process puts a link there.
    If the block raises, `path` is unchanged and the new file is gone. A folder does not replace a folder with files.

    Args:
        durable: the block forces to the disk what it writes. That the name is there is durable after `fsync_directory`.

    Raises:
        OSError: it cannot take the place.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield temporary
        (rename if durable else os.replace)(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        shutil.rmtree(temporary, ignore_errors=True)  # where it is a folder
        raise


def replace(path: Path, data: bytes) -> None:
    """Replaces a file by one whose content is on the disk. Raises `OSError`."""
    with replacing(path) as temporary:
        write_durable(temporary, data)


def replace_json(path: Path, value: Any) -> None:
    """Replaces a JSON file by one whose content is on the disk. Raises `OSError`."""
    replace(path, (json_text(value, indent=1) + "\n").encode())


def publish(path: Path, data: bytes) -> None:
    """Replaces a file that others read during the run. Readers always see a complete file. It is not forced to the disk.

    Raises `OSError`.
    """
    with replacing(path, durable=False) as temporary, open(_new(temporary), "wb") as file:
        file.write(data)


def is_meant_link(found: os.stat_result) -> bool:
    """Returns whether an entry of a run directory is a link that the user, or root, has made."""
    return stat.S_ISLNK(found.st_mode) and found.st_uid in (0, os.geteuid())


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[Path]:
    """Yields a name of the folder that stays its own in the block, whatever takes the place of `path`. Refuses one that a link of another
    user leads to. (Where there is no /proc, `path` itself.)

    Raises:
        OSError: it is such a link, or no folder.
    """
    follow = 0 if is_meant_link(path.lstat()) else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
    try:
        held = Path(f"/proc/self/fd/{descriptor}")
        yield held if held.is_dir() else path
    except OSError as error:
        if isinstance(error.filename, (str, Path)):
            error.filename = str(error.filename).replace(str(held), str(path), 1)
        raise
    finally:
        os.close(descriptor)


def remove_stale(directory: Path, names: tuple[str, ...]) -> None:
    """Removes the temporary files of `names` that a killed process left behind. No other process may be writing."""
    for name in names:
        for path in directory.glob(f".{name}.*"):
            path.unlink(missing_ok=True)


def regular(path: Path) -> BinaryIO:
    """Opens a regular file to read. A name from outside may be that of a FIFO or a device, which never ends.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - the caller closes it
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def reading(path: Path | str, refused: type[Exception] = UserError, then: str = "") -> Iterator[None]:
    """Wraps the parser of a file from outside: every error becomes one line.

    A damaged or hostile file makes a parser raise nearly anything, also MemoryError and RecursionError. The panic of a library
    in Rust is no `Exception`. The error keeps its cause, which `LOCKSTEP_DEBUG` shows.

    Args:
        refused: the error that is raised instead. If it is raised inside already, it goes through, and so does a `UserError`.
        then: what to do, behind the reason.
    """
    try:
        yield
    except (UserError, refused):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise refused(f"cannot read {path}: {reason_of(error)}{then}") from error


def reason_of(error: BaseException) -> str:
    """Returns why a file could not be read, for people."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    return printable(reason[:300]) or type(error).__name__


def sha256(path: Path) -> str:
    """Returns the sha256 of a regular file of any size, without holding the file in memory.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    digest = hashlib.sha256()
    with regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def difference(path: Path, digest: str, size: int | None = None) -> str | None:
    """Returns how a file differs from its manifest's sha256 and bytes; None: it does not. Raises `OSError` where it cannot be read."""
    if size is not None and (actual := path.stat().st_size) != size:
        return f"has {actual} bytes, expected {size}"
    if (found := sha256(path)) != digest:
        return f"has sha256 {found[:12]}…, its manifest says {digest[:12]}…"
    return None


def read(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes; a larger one is refused before it is read.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes, at most {limit} are read", str(path))
    return data


def is_locked(path: Path) -> bool | None:
    """Returns whether a process of this machine holds the lock of that file; None: there is no such file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def read_json(path: Path, limit: int = 4 << 20) -> Any:
    """Returns the value of a JSON file, or None where it is missing, larger than `limit` bytes, or no JSON."""
    try:
        return parsed(read(path, limit))
    except (OSError, ValueError):
        return None


def parsed(data: bytes) -> Any:
    """Returns the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is not JSON, or holds a value that cannot be written or shown again. Such are half a character (`\\ud800`),
            NaN, a number beyond all others, or very deep nesting.
    """
    try:
        value = json.loads(data.decode())
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, MemoryError) as error:
        raise ValueError(reason_of(error)) from None
    return value


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None, size: int = 0
) -> bytes:
    """Returns the beginning of a safetensors file; the data of the tensors follow, in their order.

    Args:
        tensors: name, element type by its name in the format, shape, and bytes of each.
        metadata: of the whole file; None: there is none.
        size: the least number of bytes, a multiple of 8.
    """
    table: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        begin, end = end, end + num_bytes
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, size - 8 - len(text))
    return len(text).to_bytes(8, "little") + text
