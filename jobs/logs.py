"""The lines of a job's logs: whose a line is, and the last ones, without reading the whole of a log."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import AnyStr, Generic

from lockstep.training import files

BLOCK = 1 << 16
HEAD = 64
"""Bytes at a line's beginning that decide whether the line counts."""
Stamped = tuple[str, str]
"""(time, line); times sort as text."""
PREFIX = re.compile(r"\[rank (\d+)\] ")
STAMPED = re.compile(rb"\S{1,64} (\[rank \d+\] )?")
"""What a line of an engine or of Kubernetes begins with: when it was written, and which rank wrote it."""
LONGEST = 1 << 20
"""Of a line that is longer (a progress bar that never breaks), pieces of about this size count as lines."""


class Pieces(Generic[AnyStr]):
    """Lines out of what comes of a log, bit by bit. Holds one piece of a line, and looks at each byte once.

    Args:
        newline: what ends a line, as text or as bytes.
        head: what every piece of a line is to begin with, as the line does: whose it is, and when it was written.
    """

    def __init__(self, newline: AnyStr, head: re.Pattern[AnyStr] | None = None) -> None:
        self._newline: AnyStr = newline
        self._head: re.Pattern[AnyStr] | None = head
        self._kept: list[AnyStr] = []
        self._size = 0

    def of(self, chunk: AnyStr) -> Iterator[AnyStr]:
        """The lines that end in this chunk, and the pieces of a longer one."""
        lines = chunk.split(self._newline)
        for line in lines[:-1]:
            self._kept.append(line)
            yield self.rest()
        self._kept.append(lines[-1])
        self._size += len(lines[-1])
        if self._size > LONGEST:
            piece = self.rest()
            head = self._head.match(piece) if self._head is not None else None
            if head is not None:
                self._kept.append(piece[: head.end()])
            yield piece

    def rest(self) -> AnyStr:
        """What stands behind the last newline; it is given once."""
        line = self._newline[:0].join(self._kept)
        self._kept.clear()
        self._size = 0
        return line


def of_rank(line: str, rank: int | None) -> str | None:
    """The line, or None where it is another rank's. One rank's lines lose their prefix."""
    if rank is None:
        return line
    match = PREFIX.match(line)
    return line[match.end() :] if match and int(match[1]) == rank else None


def begin(path: Path, count: int, counts: Callable[[bytes], bool] = lambda head: True) -> tuple[int, int]:  # noqa: ARG005
    """(where the last `count` lines of a file begin, how many there are). Holds two blocks of it, however long it is.

    Args:
        counts: whether the line counts that begins with these bytes, at most `HEAD`. Others may stand between.

    Raises:
        OSError: the file is not there, or is not a regular file.
    """
    with files.regular(path) as file:
        end = file.seek(0, 2)
        if count <= 0:
            return end, 0
        count_of, at, after = 0, end, b""
        while at > 0:
            size = min(BLOCK, at)
            at -= size
            file.seek(at)
            block = file.read(size) + after
            # A line begins at the file's start, and behind every newline but the last byte's.
            place = block.rfind(b"\n", 0, size if at + size < end else size - 1)
            while place >= 0:
                if counts(block[place + 1 : place + 1 + HEAD].partition(b"\n")[0]):
                    count_of += 1
                    if count_of == count:
                        return at + place + 1, count_of
                place = block.rfind(b"\n", 0, place)
            after = block[:HEAD]
        if end and counts(after.partition(b"\n")[0]):
            count_of += 1
        return 0, count_of


def newest(sources: Iterable[Iterable[Stamped]], count: int) -> list[Stamped]:
    """The last `count` of several logs by their times. Each is in the order in which it was written, and stays so.

    All of them are read to their ends, and no more than `count` of each is kept.
    """
    return list(deque(heapq.merge(*(deque(source, count) for source in sources), key=_time), count))


def shares(there: list[int], count: int) -> list[int]:
    """How many lines of each of several logs without times: `count` in all, dealt out evenly."""
    quotas = [0] * len(there)
    while count > 0 and (short := [index for index, number in enumerate(there) if quotas[index] < number]):
        each = max(1, count // len(short))
        for index in short[:count]:
            more = min(each, there[index] - quotas[index])
            quotas[index] += more
            count -= more
    return quotas


def last(lines: Iterable[str], count: int | None) -> Iterator[str]:
    """The last `count` of lines, which are read to their end; all as they come, without a count."""
    yield from lines if count is None else deque(lines, count)


def _time(item: Stamped) -> str:
    return item[0]
