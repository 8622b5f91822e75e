"""One `lockstep` command at a time in a folder of jobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from lockstep.jobs import private
from lockstep.training.contract import UserError


@contextlib.contextmanager
def held(folder: Path, seconds: float) -> Iterator[None]:
    """The folder's lock. Raises `UserError`: another command holds it for longer than that, or nothing can be written there."""
    try:
        with filelock.FileLock(private.make(folder) / ".lock", timeout=seconds):
            yield
    except filelock.Timeout:
        raise UserError(f"{folder} is locked by another lockstep command: wait for it") from None
    except OSError as error:
        raise UserError(f"cannot keep jobs in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
