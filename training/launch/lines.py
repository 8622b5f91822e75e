"""The launcher's output: whole lines out of many writers.

Into the launcher's output a thread a rank copies what its rank has written. torch's agent reads a rank's file while it is
being written. It prints what it finds as a line of its own, with the rank's prefix, even if the line is not complete. A line
that was written in pieces would come out in pieces, with other ranks' lines between them. The agent does not flush either:
a pipe would get nothing before some kilobytes are together.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

LIMIT = 1 << 16
"""Characters of a line without an end (a progress bar that never breaks) that are kept back at most."""
_PREFIX = re.compile(r"\[rank \d+\] ")


class WholeLines:
    """Wraps a text stream. Text of a thread is sent when its line is complete; `finish` sends incomplete lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        with self._lock:
            writer = threading.get_ident()
            begun = self._begun.pop(writer, "")
            prefix = _PREFIX.match(begun)
            line = begun + (text.removeprefix(prefix[0]) if prefix else text)
            if line.endswith("\n") or len(line) > LIMIT:
                self._send(line)
            elif line:
                self._begun[writer] = line
        return len(text)

    def finish(self) -> None:
        """Sends the lines that were never ended: their writers are gone."""
        with self._lock:
            for begun in self._begun.values():
                self._send(f"{begun}\n")
            self._begun.clear()

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk costs this line, not the thread that brings the next ones
            self._stream.write(text)
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def whole_lines() -> Iterator[Callable[[], None]]:
    """Standard output and standard error of this process in whole lines. Gives what sends those that were never ended."""
    out, err = WholeLines(sys.stdout), WholeLines(sys.stderr)

    def finish() -> None:
        out.finish()
        err.finish()

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield finish
        finally:
            finish()
