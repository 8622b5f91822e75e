"""Where a run is kept, as a command is given it: a directory, or the URL of a bucket. Imports no torch."""

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
    from ..checkpoint.score import Rule


class Location:
    """A directory.

    Args:
        name: for people.
    """

    def __init__(self, name: str) -> None:
        self.name, self._path = name, Path(name)

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._path

    @property
    def report(self) -> Path:
        """Where its report is written to."""
        return self._path / REPORT_FILE

    def look(self) -> None:
        """Has `path` show the run as it is now. Raises `UserError`."""

    def bring(self, wanted: int | Rule | None = None, warn: Callable[[str], None] = print) -> None:
        """Has `path` hold a checkpoint: the newest one, that of a step, or the best by a rule. Raises `UserError`."""


class BucketLocation(Location):
    """The URL that `checkpoint.to` of a run names, with the run as of its last commit. Its files are fetched into a folder that goes with
    the process."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._bucket = Bucket(name, retries=3)
        self._folder: Path | None = None
        self._names = set[str]()
        """Of the files of the last commit that was shown."""

    @property
    def path(self) -> Path:
        if self._folder is None:
            temporary = tempfile.mkdtemp(prefix="lockstep-")
            atexit.register(_remove, temporary, os.getpid())
            self._folder = Path(temporary, self.name.rstrip("/").rpartition("/")[2])
            self._folder.mkdir()
            self.look()
        return self._folder

    @property
    def report(self) -> Path:
        return Path(REPORT_FILE)

    def look(self) -> None:
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
        from ..checkpoint.object_store import ObjectStore

        with as_user_error(f"{self.name} cannot be read", EXIT_UNREACHABLE):
            ObjectStore(self.name).download(self.path, wanted, warn)


def location(name: str) -> Location:
    """Looks at it when it is used. Raises `UserError` for a URL that is not a bucket's."""
    return BucketLocation(name) if "://" in name else Location(str(Path(name)))


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
