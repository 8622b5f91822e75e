"""A folder's files and a manifest that has the sha256 of each: how both are written, read and compared.

What else a manifest says is its owner's: `checkpoint/store.py` (one a checkpoint), `data/shards.py` (one a set of shards).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.training import files

T = TypeVar("T")
_CHUNK = 8 << 20


class Malformed(ValueError):
    """A manifest that can be read, and is not what its owner writes."""


def read(path: Path, limit: int, check: Callable[[Any], T]) -> T:
    """What `check` makes of the manifest's value. Whatever it meets in a value that is not ours, it may trip over.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `limit` bytes.
        Malformed: it is no JSON, or `check` failed.
    """
    data = files.read(path, limit)
    try:
        value = json.loads(data)
    except Exception as error:
        raise Malformed(f"it is not valid JSON ({files.reason_of(error)})") from error
    try:
        return check(value)
    except Exception as error:
        raise Malformed(files.reason_of(error)) from error


def text(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def seal(value: dict[str, Any]) -> str:
    """The sha256 of a manifest itself, without which a flipped digit outside the checksums would go unseen."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def difference(path: Path, sha256: str, size: int | None = None) -> str | None:
    """In what a file is not as its manifest says; None: it is. Raises `OSError` where it cannot be read."""
    if size is not None and (actual := path.stat().st_size) != size:
        return f"has {actual} bytes, expected {size}"
    if (digest := files.sha256(path)) != sha256:
        return f"has sha256 {digest[:12]}…, its manifest says {sha256[:12]}…"
    return None


def write_file(path: Path, pieces: Sequence[Any]) -> dict[str, Any]:
    """Writes a new durable file while another thread hashes the same bytes. Returns its entry, {bytes, sha256}.

    Args:
        pieces: buffers of bytes, one after the other. They are not copied.
    """
    digest = hashlib.sha256()

    def hash_all() -> None:
        for piece in pieces:
            digest.update(piece)

    hasher = threading.Thread(target=hash_all, name="checkpoint-hash")
    hasher.start()
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
            for start in range(0, len(view), _CHUNK):
                files.write_all(descriptor, view[start : start + _CHUNK])
            size += len(view)
        files.fsync(descriptor)
    finally:
        os.close(descriptor)
        hasher.join()
    return {"bytes": size, "sha256": digest.hexdigest()}
