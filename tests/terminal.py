"""Runs a command in its own terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence

from tests.processes import hear_of_the_terminal

SIZE = (33, 77)
"""Lines and columns at the beginning."""


@contextlib.contextmanager
def at_a_terminal(
    command: Sequence[str], env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """The process, and both ends of its terminal: the person's, and its own."""
    ours, theirs = pty.openpty()
    resize(theirs, *SIZE)
    process = subprocess.Popen(
        command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=_at_its_terminal,
    )  # fmt: skip
    try:
        yield process, ours, theirs
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _at_its_terminal() -> None:
    hear_of_the_terminal()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def resize(fd: int, lines: int, columns: int) -> None:
    """Of a terminal, by either end; the kernel tells its foreground."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def until_shown(fd: int, what: bytes, bound: float) -> bytes:
    """What a terminal shows until `what` is there, within `bound` seconds."""
    shown, deadline = b"", time.monotonic() + bound
    while what not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([fd], [], [], 0.1)[0]:
            shown += os.read(fd, 1 << 12)
    return shown


def drained(fd: int) -> bytes:
    """What it has shown since."""
    shown = b""
    while select.select([fd], [], [], 0.1)[0]:
        shown += os.read(fd, 1 << 12)
    return shown
