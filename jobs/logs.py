"""The lines of a job's logs: the rank of each line, and the last lines, without a read of the whole log."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.training import files

from .status import Unreachable

BLOCK = 1 << 16
HEAD = 64
"""Bytes at a line's beginning that decide whether the line counts."""
Stamped = tuple[str, str]
"""(time, line); times sort as text."""
PREFIX = re.compile(r"\[rank (\d+)\] ")
CHUNK = 1 << 20
"""Bytes of one log that are read at once."""
LAST_BYTES = 1 << 14
"""Bytes at the end of a log in which `last_error` searches."""
LONGEST = 1 << 20
"""Bytes of the longest line. A longer line (a progress bar without newlines) is cut."""


_ERROR = re.compile(r"(?P<whose>\[rank \d+\] )?(?:error: |(?P<kind>(\w+\.)*\w*(Error|Exception|Interrupt)\b))")


class LineSplitter:
    """Splits the chunks of a log into lines. Cuts a line that is longer than `LONGEST`."""

    def __init__(self) -> None:
        self._kept = b""

    def of(self, chunk: bytes) -> Iterator[bytes]:
        """Yields the lines that end in this chunk."""
        *lines, last = (self._kept + chunk).split(b"\n")
        self._kept = last[: LONGEST + 1]
        yield from map(_cut, lines)

    def rest(self) -> bytes:
        """Returns the text after the last newline, and forgets this text."""
        line, self._kept = self._kept, b""
        return _cut(line)


def _cut(line: bytes) -> bytes:
    return line if len(line) <= LONGEST else line[:LONGEST] + b"... (cut: a line above 1 MiB)"


def of_rank(line: str, rank: int | None) -> str | None:
    """Returns the line; None if it is another rank's. With `rank`, the line loses its prefix."""
    if rank is None:
        return line
    match = PREFIX.match(line)
    return line[match.end() :] if match and int(match[1]) == rank else None


def follow(
    logs: dict[int, Path], rank: int | None, prefixed: bool, ended: Callable[[], bool], interval: float, last: int | None,
    noise: re.Pattern[bytes] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Yields the lines of several logs until the job has ended: of one rank, or of all with `[rank N] ` before each line.

    Args:
        logs: log files by rank; with `prefixed`, by any number.
        prefixed: whether the lines have `[rank N] ` already.
        ended: returns whether the job has ended, or no caller waits for its end.
        last: begin this many lines before the end of each log.
        noise: pattern of lines that are left out.
    """
    mark = b"[rank %d] " % rank if prefixed and rank is not None else b""

    def counts(line: bytes) -> bool:
        return line.startswith(mark) and not (noise is not None and noise.match(line))

    offsets = {key: 0 if last is None else tail_offset(path, last, counts) for key, path in logs.items()}
    splitters = {key: LineSplitter() for key in logs}
    while True:
        try:
            over = ended()  # queried before the read, so that no line is missed
        except Unreachable:
            over = False
        more = False
        for key, path in logs.items():
            chunk = b""
            with contextlib.suppress(OSError), files.regular(path) as file:
                file.seek(offsets[key])
                chunk = file.read(CHUNK)
            offsets[key] += len(chunk)
            more = more or bool(chunk)
            lines = list(splitters[key].of(chunk))
            if over and not chunk and (rest := splitters[key].rest()):
                lines.append(rest)
            for line in filter(counts, lines):
                text = line[len(mark) :].decode(errors="replace")
                yield f"[rank {key}] {text}" if rank is None and not prefixed else text
        if over and not more:
            return
        if not more:
            time.sleep(interval)


def tail_offset(path: Path, count: int, counts: Callable[[bytes], bool]) -> int:
    """Returns the offset of the last `count` lines of a file; 0 for a file that cannot be read. Holds two blocks of the file in memory.

    Args:
        counts: returns whether a line counts, from its first bytes, at most `HEAD`. Other lines may stand between.
    """
    try:
        file = files.regular(path)
    except OSError:
        return 0
    with file:
        end = at = file.seek(0, 2)
        after = b""
        while at > 0 and count > 0:
            size = min(BLOCK, at)
            at -= size
            file.seek(at)
            block = file.read(size) + after
            # A line begins at the file's start, and after every newline except at the last byte.
            place = block.rfind(b"\n", 0, size if at + size < end else size - 1)
            while place >= 0:
                if counts(block[place + 1 : place + 1 + HEAD].partition(b"\n")[0]):
                    count -= 1
                    if count == 0:
                        return at + place + 1
                place = block.rfind(b"\n", 0, place)
            after = block[:HEAD]
        return 0 if count else end


def last_error(path: Path, since: int = 0) -> str:
    """Returns the last line of a log that contains an error, after the first `since` bytes, without control codes; "" if none does."""
    try:
        with files.regular(path) as file:
            file.seek(max(since, file.seek(0, 2) - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    error = next(filter(_ERROR.match, reversed(lines)), "")
    return "".join(filter(str.isprintable, _ERROR.sub(r"\g<whose>\g<kind>", error, count=1)))[:300]
