"""A run's folder: the files that are saved in it."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_SIZE_OF_A_SAVE = 0.1
"""Files that are smaller than this share of the largest one are records, and no saves."""


def kind_of(path: str) -> str:
    """Returns the name of a file, with # in place of numbers and hexadecimal ids."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "#", path)


class Tree:
    """The files below a folder. A growing log is no news; a file that is created, replaced or truncated is."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.cost = 0.0
        """Seconds that one scan takes."""
        self.sizes: dict[str, int] = {}
        """Kind of file → bytes of the largest file."""
        self.known: dict[str, tuple[int, int, int]] = {}
        """Path → (inode, bytes, time of its last change)."""
        self.news: list[str] = []
        """Kind of each file that was created, replaced or truncated, in order."""
        self.look()
        self.news.clear()

    def look(self) -> None:
        began, found = time.perf_counter(), {}
        for path, about in _files(self.folder):
            found[path] = inode, size, changed = about.st_ino, about.st_size, about.st_mtime_ns
            before = self.known.get(path)
            if before == found[path]:
                continue
            kind = kind_of(path[len(self.folder) :])
            self.sizes[kind] = max(size, self.sizes.get(kind, 0))
            if before is None or before[0] != inode or (size <= before[1] and changed != before[2]):
                self.news.append(kind)
        self.known = found
        self.cost = time.perf_counter() - began

    def path_of(self, name: str) -> str | None:
        return next((path for path in self.known if path.endswith(f"/{name}")), None)

    def size_of(self, name: str) -> int:
        path = self.path_of(name)
        return self.known[path][1] if path else 0

    def large(self) -> frozenset[str]:
        """Returns the kinds of files that are saves."""
        least = _SIZE_OF_A_SAVE * max(self.sizes.values(), default=0)
        return frozenset(kind for kind, size in self.sizes.items() if size >= least and kind in self.news)

    def saves_of(self, kinds: frozenset[str]) -> int:
        return sum(kind in kinds for kind in self.news)


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)
