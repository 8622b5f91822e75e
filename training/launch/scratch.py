"""A temporary folder that is gone at the end, also where the end was a kill: the next process to want one removes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no Unix: what a killed process leaves stays
    fcntl = None  # type: ignore[assignment]

LOCK = ".in-use"
"""Held for as long as the process lives. Its number would say nothing to a process of another container."""


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[str]:
    """The path of a new folder below the temporary one. Folders with this prefix that no process uses any more are removed."""
    _remove_abandoned(prefix)
    held = None
    while held is None:
        path = tempfile.mkdtemp(prefix=prefix)
        held = _lock(path)
    try:
        with held:
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _lock(path: str) -> IO[str] | None:
    """The new folder's lock, held. None where another start came between the making of the file and the lock: it has taken
    the folder for an abandoned one, and removed it."""
    with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
        held = stack.enter_context(open(os.path.join(path, LOCK), "w"))
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(held.fileno()), os.stat(held.name)):
            stack.pop_all()
            return held
    return None


def _remove_abandoned(prefix: str) -> None:
    if fcntl is None:
        return
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()  # one look: in a folder of everybody's, nobody else can replace a folder of ours
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (path / LOCK).open() as lock:  # a folder without one is somebody else's, or is being made
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
