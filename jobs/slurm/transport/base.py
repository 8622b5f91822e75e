"""What every way to a cluster can do. One contract test holds all of them to it.

Whatever `lockstep.jobs.slurm` asks SLURM, reads or writes goes through here; only what runs on the nodes does not.
"""

from __future__ import annotations

import abc
import contextlib
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from typing import Any, ClassVar

from lockstep.jobs.code import store
from lockstep.jobs.foreground import Interrupt, Streams
from lockstep.jobs.slurm.transport import scripts
from lockstep.training import files
from lockstep.training.contract import UserError

SECONDS = 60.0
"""How long an answer may take by default."""
MAX_FILE = 4 << 20
"""Bytes of a record or note; a larger file is not read as one."""
CHUNK = 1 << 20
"""Bytes of one log that are read at once."""

LAST = 64 << 20
"""Bytes of the end of one log that are looked through for its last lines, where that is done elsewhere."""

Answer = subprocess.CompletedProcess[bytes]
Told = subprocess.CompletedProcess[str]
Name = str | PurePath


@dataclass(frozen=True, slots=True)
class Place:
    """The side of the cluster: its folders, its user, its Python."""

    lockstep: PurePath
    """$LOCKSTEP_HOME there."""
    here: PurePath
    """What a relative path is relative to."""
    home: PurePath
    """The user's folder."""
    user: str
    python: str
    """The interpreter of the nodes, where no other one is named."""

    @property
    def jobs(self) -> PurePath:
        """Where the SLURM jobs are kept. It must lie on storage that the nodes share."""
        return self.lockstep / "slurm"

    def code(self, identity: str) -> PurePath:
        """The unpacked copy of some code."""
        return self.lockstep / store.FOLDER / identity

    def resolve(self, path: str) -> str:
        """An absolute path of that side. `~` and relative paths are that side's, too."""
        if path == "~" or path.startswith("~/"):
            return str(self.home / path[2:])
        return str(self.here / path)


class Transport(abc.ABC):
    """A way to a cluster.

    Methods raise `Unreachable` where there is no answer in time, `OSError` where a file cannot be written, and
    `UserError` where a program is missing.
    """

    host: ClassVar[str | None] = None
    where: str = "here"
    """For people."""

    @abc.abstractmethod
    def place(self) -> Place: ...

    @abc.abstractmethod
    def run(self, *command: str, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> Told:
        """Runs a program with nothing to read. Its exit code is the caller's to judge."""

    @abc.abstractmethod
    def shell(
        self, script: str, *words: Name, data: bytes = b"", seconds: float = SECONDS,
        env: Mapping[str, str] | None = None, whole: bool = False,
    ) -> Answer:  # fmt: skip
        """Runs a script of a POSIX shell.

        Args:
            words: its `$1`, `$2`, …
            data: its standard input.
            whole: it goes on to its end whatever becomes of this process. It ignores signals where that matters.
        """

    @abc.abstractmethod
    def files(self, *wanted: tuple[Name, str]) -> dict[PurePosixPath, bytes]:
        """The regular files of (folder, pattern of names below it), of at most `MAX_FILE` bytes each."""

    @abc.abstractmethod
    def since(self, offsets: Mapping[Name, int]) -> dict[Name, bytes]:
        """What the files have got behind these places, at most `CHUNK` bytes each. One that is missing has b""."""

    @abc.abstractmethod
    def ends(self, counts: Mapping[Name, int], without: str) -> dict[Name, tuple[int, int]]:
        """Where the last lines of the files begin, so many of each, and how many there are: (0, 0) for a missing file.

        Reads the ends of the files only. Over ssh it looks at most at the last `LAST` bytes of each.

        Args:
            without: lines that match this at their beginning do not count: an expression alike to Python and `grep -E`.
        """

    @abc.abstractmethod
    def make(self, folder: Name) -> None:
        """A folder of our own, mode 0700, made where it is missing. Raises `UserError` where others could write there."""

    @abc.abstractmethod
    def check(self, folder: Name) -> None:
        """Raises `UserError` for a folder that others could write."""

    @abc.abstractmethod
    def locked(self, folder: Name, seconds: float) -> contextlib.AbstractContextManager[None]:
        """The folder's lock, which is the cluster's: whoever submits there, from wherever, waits for it."""

    @abc.abstractmethod
    def unpack(self, identity: str) -> None:
        """Code that `lockstep.jobs.code` keeps on this machine lies unpacked in `place().code(identity)`. Raises `UserError`."""

    @abc.abstractmethod
    def command(self, words: Sequence[str], tty: bool = False) -> list[str]:
        """The command of this machine that runs `words` there, with this process's streams; `tty` for a terminal.

        For what a person talks to. Its exit code is that of `words`; 255 where ssh itself failed.
        """

    @abc.abstractmethod
    def attach(self, words: Sequence[str], streams: Streams, interrupt: Interrupt, note: PurePath) -> int:
        """Runs a program there in the foreground of this one, and returns its own exit code.

        Args:
            interrupt: sends a signal to what the program runs elsewhere, where there is no terminal.
            note: a file there that may be made and removed, in a folder that exists.

        Raises:
            Disconnected: the connection was lost. The program may go on.
        """

    # What the others are enough for.

    def json(self, path: PurePath) -> Any:
        """The value of a JSON file; None where it is missing, too large, or no JSON."""
        return parsed(self.files((path.parent, path.name)).get(PurePosixPath(path)))

    def write(self, path: Name, data: bytes) -> None:
        """Replaces a file; it is on the disk, and whole at every time. Raises `OSError`."""
        self._do(scripts.WRITE, path, str(len(data)), data=data)

    def touch(self, path: Name) -> None:
        """Raises `OSError`."""
        self._do('touch -- "$1"', path)

    def remove(self, path: Name) -> None:
        """A file, or a folder with all that is in it. Raises `OSError`."""
        self._do('rm -rf -- "$1"', path)

    def make_parents(self, *paths: Name) -> None:
        """The folders above the paths. Raises `OSError`."""
        self._do('mkdir -p -- "$@"', *dict.fromkeys(PurePosixPath(path).parent for path in paths))

    def exists(self, path: Name) -> bool:
        return self.shell('[ -e "$1" ]', path).returncode == 0

    def names(self, folder: Name) -> list[str]:
        """What lies in a folder; [] where there is none."""
        told = self.shell('[ ! -d "$1" ] || ls -A -- "$1"', folder)
        return told.stdout.decode(errors="replace").splitlines()

    def _do(self, script: str, *words: Name, data: bytes = b"") -> None:
        told = self.shell(script, *words, data=data)
        if told.returncode:
            raise failure(told, str(words[0]))


def failure(told: Answer, path: str) -> OSError:
    """What a script's complaint is as an error."""
    lines = told.stderr.decode(errors="replace").strip().splitlines() or [f"the shell ended with {told.returncode}"]
    return OSError(0, lines[-1].rsplit(": ", 1)[-1], path)


def parsed(data: bytes | None) -> Any:
    """The value of a JSON text; None if it is not valid JSON."""
    try:
        return None if data is None else files.parsed(data)
    except ValueError:
        return None


def missing(program: str, where: str) -> UserError:
    """The error of a program that is not there."""
    return UserError(f"{program} is not installed {where}: submit from a node of a SLURM cluster, or set slurm.host")


def with_words(script: str, words: Sequence[Name]) -> str:
    """The script with its `$1`, `$2`, … in it."""
    return f"set -- {shlex.join(str(word) for word in words)}\n{script}" if words else script


@contextlib.contextmanager
def writing(folder: Name) -> Iterator[None]:
    """An `OSError` of the block as `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot keep the job in {folder}: {error.strerror}; set LOCKSTEP_HOME") from None
