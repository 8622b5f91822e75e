"""A run's folder: the files that are saved in it, and a full disk below it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .processes import Process

BALLAST = ".lockstep-torture-ballast"
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
                elif entry.name != BALLAST:
                    yield entry.path, entry.stat(follow_symlinks=False)


class Disk:
    """The storage below a run's folder: a small file system that can be full. If none may be mounted, it is a limit on the size of
    files that the job's processes write (EFBIG in place of ENOSPC)."""

    def __init__(self, run: Path, needed: int) -> None:
        """
        Args:
            needed: bytes of an undisturbed run.
        """
        self.run, self.filling = run, threading.Event()
        self.thread = threading.Thread(target=self._fill, daemon=True)
        size = f"size={max(32 << 20, 4 * needed)}"
        self.mounted = _succeeds(["mount", "-t", "tmpfs", "-o", size, "lockstep-torture", str(run)])

    def fill(self, living: list[Process]) -> str:
        """Fills the disk, and returns a description."""
        if self.mounted:
            room = os.statvfs(self.run)
            with (self.run / BALLAST).open("wb") as file, contextlib.suppress(OSError):  # the job may be faster
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
            self.filling.set()
            self.thread.start()
            return "the disk is full (a tmpfs)"
        for one in living:
            with contextlib.suppress(OSError):
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return "no file may grow (RLIMIT_FSIZE)"

    def _fill(self) -> None:
        """Fills space that the job frees, too."""
        with (self.run / BALLAST).open("ab", buffering=0) as file:
            while self.filling.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:
                    time.sleep(0.001)

    def release(self) -> None:
        """Frees the space."""
        if self.filling.is_set():
            self.filling.clear()
            self.thread.join()
            (self.run / BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            _succeeds(["umount", "--lazy", str(self.run)])


def _succeeds(words: list[str]) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(words, capture_output=True, check=False, timeout=30).returncode == 0
    return False
