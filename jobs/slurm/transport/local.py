"""The cluster's files and commands from a machine of it."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from lockstep.jobs import foreground, lines, lock, private
from lockstep.jobs.code import store
from lockstep.jobs.foreground import Interrupt, Streams
from lockstep.jobs.slurm.transport.base import (
    CHUNK,
    MAX_FILE,
    SECONDS,
    Answer,
    Name,
    Place,
    Told,
    Transport,
    missing,
    with_words,
)
from lockstep.jobs.status import Unreachable
from lockstep.training import files
from lockstep.training.contract import UserError

BOOT = 'eval "$(head -c "$1")"'
"""Reads a script of `$1` bytes from standard input, and leaves the rest of it to the script."""


class Local(Transport):
    def place(self) -> Place:
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a container without the user
            user = str(os.geteuid())
        return Place(private.home().absolute(), Path.cwd(), Path(os.path.expanduser("~")), user, sys.executable)

    def run(self, *command: str, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> Told:
        try:
            return subprocess.run(
                command, env={**os.environ, **(env or {})}, capture_output=True, text=True, errors="replace",
                timeout=seconds, check=False,
            )  # fmt: skip
        except FileNotFoundError:
            raise missing(command[0], self.where) from None
        except OSError as error:
            raise UserError(f"cannot run {command[0]}: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{command[0]} did not answer for {seconds:g} s") from None

    def shell(
        self, script: str, *words: Name, data: bytes = b"", seconds: float = SECONDS,
        env: Mapping[str, str] | None = None, whole: bool = False,
    ) -> Answer:  # fmt: skip
        text = with_words(script, words).encode()
        command = ["/bin/sh", "-c", BOOT, "sh", str(len(text))]
        with subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=whole,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(text + data, timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Unreachable(f"a script did not end within {seconds:g} s") from None
            except BaseException:
                if whole:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.communicate(timeout=seconds)
                process.kill()
                raise
        return Answer(command, process.returncode, out, err)

    def files(self, *wanted: tuple[Name, str]) -> dict[PurePosixPath, bytes]:
        found: dict[PurePosixPath, bytes] = {}
        for folder, pattern in wanted:
            for path in sorted(Path(folder).glob(pattern)):
                with contextlib.suppress(OSError):
                    found[PurePosixPath(path)] = files.read(path, MAX_FILE)
        return found

    def since(self, offsets: Mapping[Name, int]) -> dict[Name, bytes]:
        found = dict.fromkeys(offsets, b"")
        for name, offset in offsets.items():
            with contextlib.suppress(OSError), files.regular(Path(name)) as file:
                file.seek(offset)
                found[name] = file.read(CHUNK)
        return found

    def ends(self, counts: Mapping[Name, int], without: str) -> dict[Name, tuple[int, int]]:
        pattern, found = re.compile(without.encode()), dict.fromkeys(counts, (0, 0))
        for name, count in counts.items():
            with contextlib.suppress(OSError):
                found[name] = lines.begin(Path(name), count, lambda head: not pattern.match(head))
        return found

    def make(self, folder: Name) -> None:
        private.make(Path(folder))

    def check(self, folder: Name) -> None:
        private.check(Path(folder))

    def locked(self, folder: Name, seconds: float) -> contextlib.AbstractContextManager[None]:
        return lock.held(Path(folder), seconds)

    def unpack(self, identity: str) -> None:
        store.unpacked(identity)

    def command(self, words: Sequence[str], tty: bool = False) -> list[str]:  # noqa: ARG002 - the terminal is there
        return list(words)

    def attach(self, words: Sequence[str], streams: Streams, interrupt: Interrupt, note: PurePath) -> int:  # noqa: ARG002
        return foreground.run(words, streams, interrupt=interrupt)

    def write(self, path: Name, data: bytes) -> None:
        files.replace(Path(path), data)

    def exists(self, path: Name) -> bool:
        return Path(path).exists()


LOCAL = Local()
