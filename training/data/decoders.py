"""Image files decoded by several processes, in their order, whatever a file does to its process.

    with Decoders(224, 224, workers=8) as decoders:
        for item, result in decoders.decode(items):      # bytes: the pixels; str: why there are none
            …

What an image file may do to a process – take its memory, crash it, never end – it does to one of these. A library's pool
breaks as a whole when one of its processes dies, and tells nobody which file it was. Here a process has one file at a time,
a deadline for it, and a bound on the bytes that it answers.

The process is this module, too: python -m lockstep.training.data.decoders HEIGHT WIDTH. It writes R. Then it reads a line
of JSON for each image, {"path": …, "kind": …, "inside": …}, until stdin ends. It answers P and the pixels, uint8 RGB
[h, w, 3], or E, the length of a reason (2 bytes) and the reason. It alone imports Pillow, and nothing of ours but `files`.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .. import files

SECONDS = 60.0
"""For one image. There are small files that take hours."""
MOST_PIXELS = 100_000_000
"""Of one image. A file of a few kilobytes can unpack to gigabytes."""
MOST_BYTES = 256 << 20
"""Of one file."""
FORMATS = ("JPEG", "PNG", "WEBP")
_START_SECONDS = 120.0
_BATCH = 16
"""Images that a thread has its process decode before it comes back."""
_ROOT = Path(__file__).parents[3]
_PROGRAM = ["-m", "lockstep.training.data.decoders"]


@dataclass(frozen=True, slots=True)
class Item:
    """An image."""

    file: Path
    label: int
    name: str
    """As messages show it."""
    expected_format: str | None = None
    """`JPEG`, `PNG` or `WEBP`, by the suffix of its name; None if any of them is accepted."""
    inside: Path | None = None
    """The folder, without links, below which the file must be when it is opened; None: anywhere."""


Result: TypeAlias = bytes | str


class Decoders:
    """`workers` decoder processes, each asked by a thread."""

    def __init__(self, height: int, width: int, workers: int) -> None:
        self._processes: list[_Process] = []
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(workers, "decoder", self._begin, (height, width))
        self._most_waiting = 2 * workers

    def _begin(self, height: int, width: int) -> None:
        self._of_thread.process = process = _Process(height, width)
        self._processes.append(process)

    def __enter__(self) -> Decoders:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all processes, also in the middle of their work."""
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
        left = iter(items)
        waiting: deque[Future[list[tuple[Item, Result]]]] = deque()
        while batch := list(itertools.islice(left, _BATCH)):
            waiting.append(self._threads.submit(self._decode, batch))
            if len(waiting) > self._most_waiting:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()

    def _decode(self, batch: list[Item]) -> list[tuple[Item, Result]]:
        return [(item, self._of_thread.process.decode(item)) for item in batch]


class _Process:
    """A decoder process, which is started when it is needed, and again after a file has ended it."""

    def __init__(self, height: int, width: int) -> None:
        self._command = [sys.executable, *_PROGRAM, str(height), str(width)]
        self._bytes = height * width * 3
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def decode(self, item: Item) -> Result:
        """Only an item that ends two processes counts as broken: a machine without memory may kill any process."""
        reason = ""
        for _ in range(2):
            if self._closed:
                raise RuntimeError("nobody waits for it any more")
            if self._process is None:
                self._start()
            try:
                return self._asked(item)
            except TimeoutError:
                reason = f"decoding it takes longer than {SECONDS:.0f} s"
                self.stop()
            except (OSError, EOFError):
                reason = f"it ended its decoder process ({self.stop()})"
        return reason

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        with theirs:  # in _ROOT no folder of the user's called `training` stands before ours
            self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=theirs.fileno(), cwd=_ROOT)
        self._socket.settimeout(_START_SECONDS)
        try:
            self._read(1)
        except (OSError, EOFError):
            raise RuntimeError(f"a decoder process does not start: it ended by {self.stop()}") from None
        self._socket.settimeout(SECONDS)

    def _asked(self, item: Item) -> Result:
        inside = None if item.inside is None else str(item.inside)
        question = {"path": os.path.abspath(item.file), "kind": item.expected_format, "inside": inside}
        self._socket.sendall(json.dumps(question).encode() + b"\n")
        if self._read(1) == b"P":
            return self._read(self._bytes)
        return self._read(int.from_bytes(self._read(2), "little")).decode("utf-8", "replace")

    def _read(self, size: int) -> bytes:
        """Raises `TimeoutError` where nothing comes for `SECONDS`, `EOFError` where the process has ended."""
        data = self._answers.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def stop(self) -> str:
        """Ends the process and takes it away; the next image gets a new one. Returns how it had ended, if it had."""
        if self._process is None:
            return ""
        self._process.kill()
        code = self._process.wait()
        self._answers.close()
        self._socket.close()
        self._process = None
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """Ends the process from another thread, for good; a thread that waits for an answer gets an error."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()


# What follows runs in the decoder process.


def decoded(data: bytes, expected_format: str | None, height: int, width: int) -> bytes:
    """The pixels of an image file, uint8 RGB [h, w, 3]: upright, scaled to cover h × w, cut at the centre.

    Args:
        expected_format: `JPEG`, `PNG` or `WEBP`, where the content must be in that format.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image_format = "JPEG" if image.format == "MPO" else image.format  # a JPEG with further pictures behind it
        if expected_format is not None and image_format != expected_format:
            raise ValueError(f"its name ends in {expected_format}, but its content is {image_format}")
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"it has {image.width} × {image.height} pixels, at most {MOST_PIXELS} are read")
        if image.mode.startswith(("I", "F")):  # Pillow would cut the values off at 255
            raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}): save it with 8")
        most = 2 * max(height, width)
        image.draft(None, (most, most))  # a large JPEG is unpacked at a half, quarter or eighth
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR).tobytes()


def _content(path: Path, inside: str | None) -> bytes:
    """Of a file that is below the folder `inside` as it is opened: since it was listed, a link may have taken its place."""
    with files.regular(path) as file:
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        if not opened.exists():  # a system without /proc
            return files.read(path, MOST_BYTES)
        if inside is not None and not Path(os.readlink(opened)).is_relative_to(inside):
            raise ValueError("it is a link that leads out of the folder")
        return files.read(opened, MOST_BYTES)


def _answer(question: dict[str, str | None], height: int, width: int) -> bytes:
    from PIL import Image

    try:
        content = _content(Path(str(question["path"])), question["inside"])
        return b"P" + decoded(content, question["kind"], height, width)
    except Image.DecompressionBombError:
        reason = f"it has more than {MOST_PIXELS} pixels"
    except Image.UnidentifiedImageError:
        reason = "it is not a JPEG, PNG or WebP image"
    except Exception as error:  # noqa: BLE001 - a damaged file makes the library raise nearly anything
        reason = files.reason_of(error)
    text = reason.encode("utf-8", "backslashreplace")
    return b"E" + len(text).to_bytes(2, "little") + text


def _main(height: int, width: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for who asked us, and who ends us by closing stdin
    from PIL import Image

    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS
    files.write_all(sys.stdout.fileno(), b"R")
    while line := sys.stdin.buffer.readline():
        files.write_all(sys.stdout.fileno(), _answer(json.loads(line), height, width))


if __name__ == "__main__":
    try:
        _main(*map(int, sys.argv[1:]))
    except BrokenPipeError:
        os._exit(1)  # the reader is gone
