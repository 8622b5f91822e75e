"""Decodes image files in several processes, in their order, whatever a file does to its process.

    with Decoders(224, 224, workers=8) as decoders:
        for item, result in decoders.decode(items):      # bytes: the pixels; str: why there are none.
            …

An image file may exhaust a process' memory, crash it, or block it for ever. Only a decoder process suffers. A process decodes one
file at a time, with a deadline, and with limits of its memory and of its answer's bytes.

A ProcessPoolExecutor does not do: a file that ends a process breaks the whole pool. If a process is killed while it hands over
pixels, the pool's thread reads for ever, and Python waits for it at its exit. Workers outlive a rank that is killed (CPython 3.11).

The process is this module, too: python -m lockstep.training.data.decoders HEIGHT WIDTH. Its standard input is a connection. It
sends R. It receives lists of images in JSON, [[path, format, folder], …], until the connection ends. For each image it sends the
pixels, uint8 RGB [h, w, 3], or an empty message and a reason. It alone imports Pillow, and nothing of ours that is heavy.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from lockstep.wire.signals import signals_held_back

from .. import files
from ..limits import DECODE_SECONDS, DECODER_START_SECONDS

MAX_PIXELS = 100_000_000
"""The largest image. A file of a few kilobytes can unpack to gigabytes."""
MAX_BYTES = 256 << 20
"""The largest file."""
MAX_MEMORY = 4 << 30
"""Bytes of a process' address space. The largest image takes half of it."""
FORMATS = ("JPEG", "PNG", "WEBP")
_BATCH = 16
"""Images that a thread asks its process for at once."""
_ROOT = Path(__file__).parents[3]
_PROGRAM = ["-m", "lockstep.training.data.decoders"]


@dataclass(frozen=True, slots=True)
class Item:
    """An image."""

    file: Path
    label: int
    name: str
    """The name for messages."""
    expected_format: str | None = None
    """`JPEG`, `PNG` or `WEBP`, by the suffix of its name; None if any of them is accepted."""
    inside: Path | None = None
    """The folder, without links, below which the file must be when it is opened; None: anywhere."""


Result: TypeAlias = bytes | str


class Decoders:
    """A pool of `workers` decoder processes, each with a thread that sends it requests."""

    def __init__(self, height: int, width: int, workers: int) -> None:
        self._processes = [_Process(height, width) for _ in range(workers)]
        self._idle = deque(self._processes)
        self._threads = ThreadPoolExecutor(workers, "decoder")

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes, even in the middle of their work."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.stop()

    def decode(self, items: Iterable[Item]) -> Generator[tuple[Item, Result], None, None]:
        """Yields each item, in order, with its pixels (uint8 RGB [h, w, 3]), or the reason why it has none.

        At most a few batches for each process are under way at once.

        Raises `RuntimeError` if no process can be started.
        """
        remaining = iter(items)
        waiting: deque[Future[list[tuple[Item, Result]]]] = deque()
        while batch := list(itertools.islice(remaining, _BATCH)):
            waiting.append(self._threads.submit(self._decode, batch))
            if len(waiting) > 2 * len(self._processes):
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()

    def _decode(self, batch: list[Item]) -> list[tuple[Item, Result]]:
        process = self._idle.pop()  # there are no more threads than processes
        try:
            return list(zip(batch, process.decode(batch)))
        finally:
            self._idle.append(process)


class _Process:
    """A decoder process. It is started on demand, and again after a file has ended it."""

    def __init__(self, height: int, width: int) -> None:
        self._command = [sys.executable, *_PROGRAM, str(height), str(width)]
        self._bytes = height * width * 3
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def decode(self, items: list[Item]) -> list[Result]:
        """Returns the items' results. An item is broken only if it ends two processes: a machine without memory may kill any process."""
        questions = [(os.path.abspath(item.file), item.expected_format, str(item.inside or "")) for item in items]
        results: list[Result] = []
        suspect = -1
        while len(results) < len(items):
            if self._closed:
                raise RuntimeError("the decoders are closed")
            if self._process is None:
                self._start()
            try:
                self._connection.send_bytes(json.dumps(questions[len(results) :]).encode())
                while len(results) < len(items):
                    results.append(
                        self._received(DECODE_SECONDS) or self._received(DECODE_SECONDS).decode("utf-8", "replace")
                    )
            except (OSError, EOFError) as error:
                reason = f"it ended its decoder process ({self.stop()})"
                if isinstance(error, TimeoutError):
                    reason = f"decoding it takes longer than {DECODE_SECONDS:.0f} s"
                if suspect == len(results):
                    results.append(reason)
                else:
                    suspect = len(results)
        return results

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # Signals are for the rank, which ends the process: it inherits the mask, and never takes any. In _ROOT no folder of
        # the user's called `training` stands before ours.
        with theirs, signals_held_back():
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, cwd=_ROOT)
        if self._closed:  # `close` may have seen no process
            self._process.kill()
        try:
            self._received(DECODER_START_SECONDS)
        except (OSError, EOFError):
            raise RuntimeError(f"a decoder process does not start: it ended by {self.stop()}") from None

    def _received(self, seconds: float) -> bytes:
        """Returns the next message. Raises `TimeoutError` if none comes in time, `EOFError` if the process has ended."""
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(max(self._bytes, 65535))  # a reason is short

    def stop(self) -> str:
        """Ends the process; the next image starts a new one. Returns how the process had ended before, if it had."""
        if self._process is None:
            return ""
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        self._process = None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Ends the process for good, from another thread. A thread that waits for an answer gets an error."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()


# The rest runs in the decoder process.


def decoded(data: bytes, expected_format: str | None, height: int, width: int) -> bytes:
    """Returns the pixels of an image file, uint8 RGB [h, w, 3]: upright, scaled to cover h × w, cut at the centre.

    Args:
        expected_format: `JPEG`, `PNG` or `WEBP`, if the content must be in that format.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image_format = "JPEG" if image.format == "MPO" else image.format  # a JPEG with further pictures behind it
        if expected_format is not None and image_format != expected_format:
            raise ValueError(f"its name ends in {expected_format}, but its content is {image_format}")
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"it has {image.width} × {image.height} pixels, at most {MAX_PIXELS} are read")
        if image.mode.startswith(("I", "F")):  # Pillow would cut the values off at 255
            raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}): save it with 8")
        most = 2 * max(height, width)
        image.draft(None, (most, most))  # a large JPEG is unpacked at a half, quarter or eighth
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR).tobytes()


def _content(path: Path, inside: str) -> bytes:
    """Returns the content of a file that is below the folder `inside` when it is opened: a link may have replaced it since the listing."""
    with files.regular(path) as file:
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        if not opened.exists():  # a system without /proc
            return files.read(path, MAX_BYTES)
        if inside and not Path(os.readlink(opened)).is_relative_to(inside):
            raise ValueError("it is a link that leads out of the folder")
        return files.read(opened, MAX_BYTES)


def _result(path: str, expected_format: str | None, inside: str, height: int, width: int) -> Result:
    from PIL import Image

    try:
        return decoded(_content(Path(path), inside), expected_format, height, width)
    except Image.DecompressionBombError:
        return f"it has more than {MAX_PIXELS} pixels"
    except Image.UnidentifiedImageError:
        return "it is not a JPEG, PNG or WebP image"
    except Exception as error:  # noqa: BLE001 - a damaged file makes the library raise nearly anything
        return files.reason_of(error)


def _limit(kind: int, most: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the user's limit is lower, or the system has none
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _main(height: int, width: int) -> None:
    from PIL import Image

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    connection = Connection(sys.stdin.fileno())
    connection.send_bytes(b"R")
    while True:
        for path, expected_format, inside in json.loads(connection.recv_bytes()):
            _limit(
                resource.RLIMIT_CPU, int(time.process_time() + DECODE_SECONDS) + 1
            )  # in case the parent is gone, which would kill this process
            result = _result(path, expected_format, inside, height, width)
            if isinstance(result, str):
                connection.send_bytes(b"")
                result = result.encode("utf-8", "backslashreplace")
            connection.send_bytes(result)


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other end is gone
        _main(*map(int, sys.argv[1:]))
