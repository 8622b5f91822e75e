"""The location of a run in a command's arguments: a directory, or the URL of a bucket. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..bucket import Bucket, as_user_error
from ..contract import EXIT_UNREACHABLE, REPORT_FILE, UserError

if TYPE_CHECKING:
    from ..checkpoint.store import Rule


class Location:
    """A directory, or the URL in `checkpoint.to` of a run, which has the run as of its last commit. The files of a bucket are fetched into
    a folder that is removed when the process ends.

    Raises:
        UserError: the URL names no bucket.
    """

    def __init__(self, name: str) -> None:
        self._bucket = Bucket(name) if "://" in name else None
        self._folder = None if self._bucket else Path(name)
        self.name = str(self._folder or name)
        """The name for messages."""
        self._names = set[str]()
        """The names of the files in the last commit that `look` fetched."""

    @property
    def path(self) -> Path:
        """The run's directory. The first access to a bucket fetches its files."""
        if self._folder is None:
            temporary = tempfile.mkdtemp(prefix="lockstep-")
            atexit.register(_remove, temporary, os.getpid())
            self._folder = Path(temporary, self.name.rstrip("/").rpartition("/")[2])
            self._folder.mkdir()
            self.look()
        return self._folder

    @property
    def report(self) -> Path:
        """The path to write the report to."""
        return Path(REPORT_FILE) if self._bucket else self.path / REPORT_FILE

    def look(self) -> None:
        """Updates `path` to the present state of the run. Raises `UserError`."""
        if self._bucket is None:
            return
        with as_user_error(f"{self.name} cannot be read", EXIT_UNREACHABLE):
            for head in self._bucket.heads():
                if not head.run_files:
                    raise UserError(
                        f"{self.name} holds a run that has committed nothing yet: a run does with its first checkpoint, and at its end"
                    )
                with contextlib.suppress(FileNotFoundError):  # of a commit that a newer one has replaced meanwhile
                    self._bucket.restore(head.run_files, self.path)
                    for name in self._names - head.run_files.keys():
                        (self.path / name).unlink()
                    self._names = {*head.run_files}
                    return
        raise UserError(f"{self.name} has no run, or lacks files of it: give what its checkpoint.to says")

    def bring(self, wanted: int | Rule | None = None, warn: Callable[[str], None] = print) -> None:
        """Downloads a checkpoint into `path`: the newest, that of a step, or the best by a rule. Raises `UserError`."""
        if self._bucket is None:
            return
        from ..checkpoint.object_store import ObjectStore

        with as_user_error(f"{self.name} cannot be read", EXIT_UNREACHABLE):
            ObjectStore(self.name).download(self.path, wanted, warn)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
