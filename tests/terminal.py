"""Runs a command in a new terminal."""

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
TRAPS = "trap 'echo got; exit 5' INT; echo ready; while :; do sleep 0.05; done"
"""A program of a shell that says when it is ready, and what it does at an interrupt."""


@contextlib.contextmanager
def at_a_terminal(
    command: Sequence[str], env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Yields the process and both ends of its terminal: the user's, then the program's."""
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
    """Resizes a terminal, by either end; the kernel signals the foreground process."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def until_shown(fd: int, what: bytes, bound: float) -> bytes:
    """Returns a terminal's output until `what` is there, within `bound` seconds."""
    output, deadline = b"", time.monotonic() + bound
    while what not in output:
        assert time.monotonic() < deadline, output
        if select.select([fd], [], [], 0.1)[0]:
            output += os.read(fd, 1 << 12)
    return output


def drained(fd: int) -> bytes:
    """Returns the output since the last read."""
    output = b""
    while select.select([fd], [], [], 0.1)[0]:
        output += os.read(fd, 1 << 12)
    return output
