"""Image files decoded by several processes, in their order, whatever a file does to its process.

with Decoders(224, 224, workers=8) as decoders:
    for item, result in decoders.decode(items):      # bytes: the pixels; str: why there are none
        …
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lockstep.training import extras
from lockstep.training.parallel.world import cores

SECONDS = 60.0
"""For one image. There are small files that take hours."""
_START_SECONDS = 120.0
_BATCH = 16
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Item:
    """An image."""

    file: Path
    label: int
    name: str
    """As messages show it."""
    expected_format: str | None = None
    """`JPEG`, `PNG` or `WEBP`; None if any of them is accepted."""
    inside: Path | None = None
    """The folder, without links, below which the file must be when it is opened; None: anywhere."""


Result: TypeAlias = bytes | str


class Decoders:
    """Some decoder processes, each asked by a thread.

    Args:
        workers: 0: one for each core that this process may use.

    Raises:
        UserError: Pillow is not installed.
    """

    def __init__(self, height: int, width: int, workers: int = 0) -> None:
        extras.require("PIL")
        self.workers = workers or cores()
        self._size = height, width
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="decoder")
        self._local = threading.local()
        self._processes: list[_Process] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes, also in the middle of their work."""
        with self._lock:
            for process in self._processes:
                process.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.stop()

    def decode(self, items: Iterable[Item]) -> Generator[tuple[Item, Result], None, None]:
        """Each item, in their order, with its pixels (uint8 RGB [h, w, 3]), or why there are none.

        No more than a few batches for each process are on the way at once.

        Raises `RuntimeError` where no process can be started.
        """
        waiting: deque[tuple[list[Item], Future[list[Result]]]] = deque()
        try:
            for batch in _batches(items):
                waiting.append((batch, self._threads.submit(self._decode, batch)))
                if len(waiting) > 2 * self.workers:
                    asked, future = waiting.popleft()
                    yield from zip(asked, future.result())
            while waiting:
                asked, future = waiting.popleft()
                yield from zip(asked, future.result())
        finally:
            for _, future in waiting:
                future.cancel()

    def _decode(self, batch: list[Item]) -> list[Result]:
        process: _Process | None = getattr(self._local, "process", None)
        if process is None:
            process = self._local.process = _Process(*self._size)
            with self._lock:
                self._processes.append(process)
        return process.decode(batch)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    left = iter(items)
    while batch := list(itertools.islice(left, _BATCH)):
        yield batch


class _LostError(Exception):
    """The process did not answer."""


class _Process:
    def __init__(self, height: int, width: int) -> None:
        self._command = [sys.executable, "-m", "lockstep.training.data.decoder", str(height), str(width)]
        self._bytes = height * width * 3
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def decode(self, batch: list[Item]) -> list[Result]:
        """A result for each item. If an item ends the process, a new process continues with that item.

        Only an item that ends two processes counts as broken: a machine without memory may kill any process.
        """
        results: list[Result] = []
        suspect = -1
        while len(results) < len(batch) and not self._closed:
            left = batch[len(results) :]
            try:
                process = self._started()
                self._ask(process, left)
                for _ in left:
                    results.append(self._answer(process))
            except _LostError as error:
                self.stop()
                if len(results) == suspect:
                    results.append(str(error))
                else:
                    suspect = len(results)
        return results

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        with self._lock:
            if self._closed:
                raise _LostError("nobody waits for it any more")
            # There, no folder of the user's called `training` stands before ours.
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
            )
        try:
            self._read(process, 1, _START_SECONDS)
        except _LostError as error:
            raise RuntimeError(f"a decoder process does not start: {error}") from None
        return process

    def _ask(self, process: subprocess.Popen[bytes], items: list[Item]) -> None:
        asked = [
            {
                "path": os.path.abspath(item.file),
                "kind": item.expected_format,
                "inside": None if item.inside is None else str(item.inside),
            }
            for item in items
        ]
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise _LostError(_ending(process)) from None

    def _answer(self, process: subprocess.Popen[bytes]) -> Result:
        if self._read(process, 1, SECONDS) == b"P":
            return self._read(process, self._bytes, SECONDS)
        size = int.from_bytes(self._read(process, 4, SECONDS), "little")
        return self._read(process, size, SECONDS).decode("utf-8", "replace")

    def _read(self, process: subprocess.Popen[bytes], size: int, seconds: float) -> bytes:
        assert process.stdout is not None
        data, deadline, descriptor = bytearray(), time.monotonic() + seconds, process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while len(data) < size:
            if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
                raise _LostError(f"decoding it takes longer than {seconds:.0f} s")
            piece = os.read(descriptor, size - len(data))
            if not piece:
                raise _LostError(_ending(process))
            data += piece
        return bytes(data)

    def stop(self) -> None:
        """Ends the process and takes it away. The next batch gets a new one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not sent yet
                    stream.close()  # type: ignore[union-attr]

    def close(self) -> None:
        """Ends the process from another thread; a thread that waits for an answer gets an error."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()


def _ending(process: subprocess.Popen[bytes]) -> str:
    code = process.wait()
    return (
        f"it ended its decoder process (signal {-code})"
        if code < 0
        else f"it ended its decoder process (exit code {code})"
    )
