"""A run as a command is given it: its directory, or the URL of the bucket that keeps it. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..bucket import TRIES, Bucket
from ..contract import EXIT_UNREACHABLE, REPORT_FILE, UserError
from ..observe.mirror import Damaged, Snapshot, listed

if TYPE_CHECKING:
    from ..checkpoint.score import Rule


class Run:
    """A run in a directory.

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


class _InBucket(Run):
    """A run whose `checkpoint.to` names the URL. Its files are fetched into a folder that goes with the process."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._bucket = Bucket(name, retries=3)
        self._folder: Path | None = None

    @property
    def path(self) -> Path:
        if self._folder is None:
            self.look()
        assert self._folder is not None
        return self._folder

    @property
    def report(self) -> Path:
        return Path(REPORT_FILE)

    def look(self) -> None:
        with self._explained():
            snapshot = self._snapshot()
            if self._folder is None:
                temporary = tempfile.mkdtemp(prefix="lockstep-")
                atexit.register(_remove, temporary, os.getpid())
                self._folder = Path(temporary, self.name.rstrip("/").rpartition("/")[2])
                self._folder.mkdir()
            snapshot.restore(self._folder)
            for name in listed(self._folder).keys() - snapshot.files.keys():
                (self._folder / name).unlink()

    def _snapshot(self) -> Snapshot:
        for _ in range(TRIES):
            found = self._bucket.read_head()
            if found is None:
                raise UserError(f"{self.name} has no run: give what its checkpoint.to says")
            with contextlib.suppress(FileNotFoundError):  # another attempt may have begun meanwhile
                return Snapshot.of(self._bucket, found.head)
        raise UserError(
            f"{self.name} holds a run that has not written anything down yet: a run does once its ranks have met"
        )

    def bring(self, wanted: int | Rule | None = None, warn: Callable[[str], None] = print) -> None:
        from ..checkpoint.object_store import ObjectStore

        with self._explained():
            ObjectStore(self.name).bring_one(self.path, wanted, warn)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Damaged) as error:
            away = UserError(f"{self.name} cannot be read: {error}")
            if not isinstance(error, (Damaged, PermissionError)):
                away.code = EXIT_UNREACHABLE
            raise away from None


def opened(name: str) -> Run:
    """Looks at it when it is used. Raises `UserError` for a URL that is not a bucket's."""
    return _InBucket(name) if "://" in name else Run(str(Path(name)))


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
