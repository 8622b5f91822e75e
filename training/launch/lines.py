"""The launcher's output: what its ranks write, in whole lines, each with its rank, at once."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import selectors
import sys
import threading
from typing import TextIO

from ..limits import OUTPUT_LOOK_SECONDS, OUTPUT_SECONDS

LIMIT = 1 << 16
"""Characters of a line without an end (a progress bar that never breaks) that are kept back at most."""


_AT_ONCE = 1 << 20
"""Bytes of one look: a pipe holds no more, so one look takes all that was there."""


class _Pipe:
    """Of one rank, to its output or its errors."""

    def __init__(self, rank: int, out: TextIO) -> None:
        self.rank, self._out, self._begun = rank, out, ""
        self.ended = False
        """Its process has ended."""
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    def take(self, data: bytes) -> None:
        """Prints the lines that are complete; with b"", which ends it, also the last one."""
        *lines, self._begun = (self._begun + self._decoder.decode(data, final=not data)).split("\n")
        if self._begun and (not data or len(self._begun) > LIMIT):
            lines, self._begun = [*lines, self._begun], ""
        for line in lines:
            # A full disk, a reader that left, closed (None): that costs this line, not the thread that brings the next ones.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._out.write(f"[rank {self.rank}] {line}\n")
                self._out.flush()


class Copies:
    """Copies what ranks write into their pipes to this process's streams, each line with its rank, in a thread.

    Nothing that a rank has written before its end is lost, and nobody who keeps its pipe open is waited for.
    """

    def __init__(self) -> None:
        self._selector, self._changing = selectors.DefaultSelector(), threading.Lock()
        self._pipes: dict[int, list[_Pipe]] = {}
        """Rank → those of the process that was started last in its place."""
        self._thread: threading.Thread | None = None
        """None where there is no pipe left."""

    def pipes(self, rank: int) -> tuple[int, int]:
        """Descriptors for the output and the errors of a rank that is about to start: close them when it has."""
        writes, self._pipes[rank] = [], [_Pipe(rank, out) for out in (sys.stdout, sys.stderr)]
        for pipe in self._pipes[rank]:
            descriptor, other = os.pipe()
            with self._changing:
                self._selector.register(descriptor, selectors.EVENT_READ, pipe)
            writes.append(other)
        return writes[0], writes[1]

    def begin(self) -> None:
        """Ranks have started. Call it again when more have: the thread ends with the last pipe."""
        with self._changing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
                self._thread.start()

    def ended(self, rank: int) -> None:
        """The process that was started last in this rank's place writes no more."""
        for pipe in self._pipes.get(rank, ()):
            pipe.ended = True

    def finish(self) -> None:
        """All ranks have ended: returns when what they have written is printed."""
        for rank in self._pipes:
            self.ended(rank)
        if (thread := self._thread) is not None:
            thread.join(OUTPUT_SECONDS)
        if thread is None or not thread.is_alive():
            self._selector.close()

    def _copy(self) -> None:
        while keys := self._open():
            ended = [key.fd for key in keys if key.data.ended]  # before the look: what they have written is there
            ready = {key.fd for key, _ in self._selector.select(0 if ended else OUTPUT_LOOK_SECONDS)}
            for key in keys:
                data = os.read(key.fd, _AT_ONCE) if key.fd in ready else b""
                if data:
                    key.data.take(data)
                if key.fd in ended or (key.fd in ready and not data):  # what has left the rank's group may write on
                    key.data.take(b"")
                    with self._changing:
                        self._selector.unregister(key.fd)
                    os.close(key.fd)

    def _open(self) -> list[selectors.SelectorKey]:
        with self._changing:
            if not (keys := list(self._selector.get_map().values())):
                self._thread = None
            return keys
