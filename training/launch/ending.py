"""The end of ranks and nodes: the exit code for people and for clusters, the causes of failures, the count of restarts."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Container, Mapping
from pathlib import Path

from .. import files
from ..contract import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    UserError,
    named,
    to_stderr,
)

FINAL = (EXIT_USAGE, EXIT_PREEMPTED)
"""Exit codes of a rank after which the ranks do not restart."""
_OURS = (signal.SIGTERM, signal.SIGKILL)
"""The signals with which the launcher ends the other ranks."""
_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", by hand or because the memory was used up",
    signal.SIGABRT: ", as by gloo if ranks exchange tensors of different sizes: one may have taken another step, or left the loop",
}
"""What may have sent a signal."""
COUNT_FILE = "lockstep-restarts.json"
"""Name of the count's file in the folder of `--restarts-dir`, which may hold other files."""


def exit_code(codes: Collection[int]) -> int:
    """Returns one code for those of the failed ranks: wrong usage beats preempted beats failed."""
    return next((code for code in FINAL if code in codes), EXIT_FAILED)


def cluster_code(code: int, scheme: str, attempt: int, max_restarts: int) -> int:
    """Returns the code for the cluster. Kubernetes' `restartPolicy: ExitCode` retries only codes of 128 and above.

    Args:
        attempt: restarts of the job so far, by its first node and by replacement of that node.
    """
    if scheme == "plain" or code in (EXIT_DONE, EXIT_USAGE):
        return code
    if code == EXIT_PREEMPTED:
        return 128 + signal.SIGTERM
    return 138 if attempt < max_restarts else EXIT_FAILED


def without_ended(codes: Mapping[int, int], failed: Mapping[int, int]) -> dict[int, int]:
    """Returns the codes without the 75 of ranks that the launcher ended after another rank's failure: no signal asked them to save.

    Args:
        codes: rank → exit code of all failed ranks.
        failed: rank → exit code of the ranks that had failed before.
    """
    asked = not failed or not set(FINAL).isdisjoint(failed.values())
    return {rank: code for rank, code in codes.items() if asked or rank in failed or code != EXIT_PREEMPTED}


def too_early(codes: Mapping[int, int], signalled: int | None) -> str:
    """Returns a sentence about a forwarded signal that ended a rank during its imports, so that nothing is lost; "": there was none.

    A rank that has begun catches all forwarded signals.
    """
    return signal.Signals(signalled).name if signalled is not None and -signalled in codes.values() else ""


def deaths(
    codes: Mapping[int, int], signalled: int | None, failed: Container[int] = (), ours: bool = True
) -> list[str]:
    """Returns a sentence for each way in which ranks failed by themselves, signals first. Leaves out forwarded signals, and the launcher's
    signal that ends the others. Also leaves out ranks with a `FINAL` code, which report the reason themselves.

    Args:
        codes: rank → exit code of the failed ranks.
        failed: ranks that had failed before the launcher ended the others. Empty if the first rank failed after that. SIGTERM is then
            the launcher's, if another rank ended otherwise.
        ours: whether the ranks are `python -m lockstep.training run`, which report the reasons of their codes themselves.
    """
    by_itself = any(-code not in _OURS for code in codes.values())
    ends = _OURS if failed else (signal.SIGTERM,) if by_itself else ()
    ways: dict[str, list[int]] = {}
    for rank, code in sorted(codes.items()):
        by_launcher = -code in ends and rank not in failed
        if -code != signalled and not by_launcher and (code < 0 or not ours) and code not in FINAL:
            ways.setdefault(f"{'was ' if code < 0 else ''}{how(code)}", []).append(rank)
    return [f"rank {named(ranks)} {what}" for what, ranks in sorted(ways.items(), reverse=True)]


def how(code: int) -> str:
    """Returns how a process has ended, by its exit code in Python's form: negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"ended by {name}{_CAUSES.get(-code, '')}"


class Attempts:
    """The count of a job's restarts, in a file that a replaced first node reads again. Without a folder it lasts as long as the process.

    Kubernetes replaces a failed pod (`restartPolicy: ExitCode`) without counting, and a killed launcher cannot count itself. So the first
    node, which counts for all, keeps a file on the run's shared storage. While the ranks run, the file counts one restart more: the one
    that follows if this launcher is killed.

    Args:
        folder: folder of the file, one for each job; None: no file.
        limit: allowed restarts.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.limit = limit
        self.used = self.times = 0
        """Restarts of the job (`used`), and restarts by this launcher (`times`)."""
        self._file = None if folder is None else folder / COUNT_FILE

    @property
    def left(self) -> int:
        return self.limit - self.used

    def begin(self) -> bool:
        """Counts a killed predecessor. Returns False if the limit is passed, so that the ranks must not start. Raises `UserError`."""
        if self._file is None:
            return True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.used = self._read(self._file)
            if self.left < 0:
                self._file.unlink()
                return False
            self._write(self._file, self.used + 1)
        except OSError as error:
            raise UserError(f"cannot count restarts in {self._file.parent}: {error.strerror}") from None
        return True

    def restarted(self) -> None:
        """Counts a restart of the ranks."""
        self.used, self.times = self.used + 1, self.times + 1
        self._count(self.used + 1)

    def end(self, code: int, final: bool = False) -> None:
        """Settles the count: a preemption costs nothing, a failure costs one, and a final end resets the count.

        Args:
            final: whether the job is over, even with restarts left.
        """
        if code == EXIT_PREEMPTED:
            self._count(self.used)
        elif self._file is not None and (final or code != EXIT_FAILED or self.left <= 0):
            self._file.unlink(missing_ok=True)

    @staticmethod
    def _read(file: Path) -> int:
        try:
            return int(files.parsed(files.read(file, 1 << 16))["used"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError):
            return 1  # a machine crashed during the write

    @staticmethod
    def _write(file: Path, used: int) -> None:
        files.publish(file, json.dumps({"used": used}).encode())

    def _count(self, used: int) -> None:
        """Writes the count, if the job has one. How the job ends is as it would be without the file."""
        if self._file is not None and self._file.exists():
            try:
                self._write(self._file, used)
            except OSError as error:
                to_stderr(f"launch: warning: cannot count restarts in {self._file.parent}: {error.strerror}")
