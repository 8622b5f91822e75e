"""How often a node was restarted, counted where a replaced node finds it again.

Kubernetes replaces a failed pod (`restartPolicy: ExitCode`) without counting, and a killed launcher cannot count
itself. So each node keeps a file on the run's shared storage; one that says "running" at the start was killed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import EXIT_FAILED, EXIT_PREEMPTED, UserError

PREFIX = "lockstep-restarts-"
"""Of the files' names: the folder may hold others, which are left alone."""


class Attempts:
    """The count of one node. Without a folder it lives as long as the process.

    Args:
        node: a name that the replaced node has again (its host name).
        limit: restarts that are allowed.
    """

    def __init__(self, folder: Path | None, node: str, limit: int) -> None:
        self.limit = limit
        self.used = self._begun = 0
        self._file = folder / f"{PREFIX}{re.sub(r'[^A-Za-z0-9.-]', '_', node)}.json" if folder is not None else None

    @property
    def left(self) -> int:
        return self.limit - self.used

    def begin(self) -> bool:
        """Counts a predecessor that was killed. False: the limit is passed, do not start. Raises `UserError`."""
        if self._file is None:
            return True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.used, killed = self._read(self._file)
        except OSError as error:
            raise UserError(f"cannot count restarts in {self._file.parent}: {error.strerror}") from None
        self.used += killed
        if self.used > self.limit:
            self._forget()
            return False
        self._begun = self.used
        self._write(running=True)
        return True

    def restarted(self, times: int) -> None:
        """The ranks have been restarted `times` times since `begin`."""
        self.used = self._begun + times
        self._write(running=True, only_known=True)

    def end(self, code: int, final: bool = False) -> None:
        """Settles the count: a preemption costs nothing, a failure one, and with a final ending the job forgets.

        Args:
            final: the job is over, whatever restarts this node has left.
        """
        if code == EXIT_PREEMPTED:
            self._write(running=False, only_known=True)
        elif final or code != EXIT_FAILED or self.left <= 0:
            self._forget()
        else:
            self.used += 1
            self._write(running=False, only_known=True)
            self.used -= 1  # what `cluster_code` compares with the limit: restarts so far

    @staticmethod
    def _read(file: Path) -> tuple[int, int]:
        try:
            value = files.parsed(files.read(file, 1 << 16))
            return int(value["used"]), int(value["running"] is True)
        except FileNotFoundError:
            return 0, 0
        except (ValueError, KeyError, TypeError):
            return 0, 1  # cut off while it was written: by a kill

    def _write(self, running: bool, only_known: bool = False) -> None:
        if self._file is None or (only_known and not self._file.exists()):
            return  # another node's final ending has removed the counts of the whole job
        try:
            files.publish(self._file, json.dumps({"used": self.used, "running": running}).encode())
        except OSError as error:
            raise UserError(f"cannot count restarts in {self._file.parent}: {error.strerror}") from None

    def _forget(self) -> None:
        if self._file is not None:
            for file in self._file.parent.glob(f"{PREFIX}*.json"):
                file.unlink(missing_ok=True)
