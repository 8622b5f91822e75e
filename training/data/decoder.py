"""The program of a decoder process: python -m lockstep.training.data.decoder HEIGHT WIDTH

It reads batches from stdin until that ends: a line of JSON, a list of {"path": …} with the "kind" that the file's name
promises or null, and the folder that it must be "inside" of or null. It answers each image at once: P and its pixels, uint8
RGB [h, w, 3], or E, the length of a reason (4 bytes) and the reason. Before all of them it writes R.

What an image file may do to a process – take its memory, crash it, never end – it does to this one. It imports Pillow and
nothing of ours but `files`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from pathlib import Path

from PIL import Image, ImageOps

from lockstep.training import files

MOST_PIXELS = 100_000_000
"""Of one image. A file of a few kilobytes can unpack to gigabytes."""
MOST_BYTES = 256 << 20
"""Of one file."""
FORMATS = ("JPEG", "PNG", "WEBP")


class _RefusedError(Exception):
    pass


def decoded(data: bytes, expected_format: str | None, height: int, width: int) -> bytes:
    """The pixels of an image file, uint8 RGB [h, w, 3]: upright, scaled to cover h × w, cut at the centre.

    Args:
        expected_format: `JPEG`, `PNG` or `WEBP`, where the content must be in that format.
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        image_format = "JPEG" if image.format == "MPO" else image.format  # a JPEG with further pictures behind it
        if expected_format is not None and image_format != expected_format:
            raise _RefusedError(f"its name ends in {expected_format}, but its content is {image_format}")
        if image.width * image.height > MOST_PIXELS:
            raise _RefusedError(f"it has {image.width} × {image.height} pixels, at most {MOST_PIXELS} are read")
        if image.mode.startswith(("I", "F")):  # Pillow would cut the values off at 255
            raise _RefusedError(f"it has more than 8 bits a channel (mode {image.mode}): save it with 8")
        most = 2 * max(height, width)
        image.draft(None, (most, most))  # a large JPEG is unpacked at a half, quarter or eighth
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR).tobytes()


def _content(path: Path, inside: object) -> bytes:
    """Of a file that is below the folder `inside` as it is opened: since it was listed, a link may have taken its place."""
    with files.regular(path) as file:
        opened = Path(f"/proc/self/fd/{file.fileno()}")
        if inside is None or not opened.exists():  # a system without /proc
            return files.read(path, MOST_BYTES)
        if not Path(os.readlink(opened)).is_relative_to(str(inside)):
            raise _RefusedError("it is a link that leads out of the folder")
        return files.read(opened, MOST_BYTES)


def _answer(item: dict[str, object], height: int, width: int) -> bytes:
    try:
        content = _content(Path(str(item["path"])), item["inside"])
        expected_format = item["kind"]
        return b"P" + decoded(content, None if expected_format is None else str(expected_format), height, width)
    except _RefusedError as error:
        reason = str(error)
    except Image.DecompressionBombError:
        reason = f"it has more than {MOST_PIXELS} pixels"
    except Image.UnidentifiedImageError:
        reason = "it is not a JPEG, PNG or WebP image"
    except OSError as error:
        reason = error.strerror or str(error)
    except MemoryError:
        reason = "there is not enough memory for it"
    except Exception as error:  # noqa: BLE001 - a damaged file makes the library raise nearly anything
        reason = str(error) or type(error).__name__
    text = " ".join(reason.split())[:300].encode("utf-8", "backslashreplace")
    return b"E" + len(text).to_bytes(4, "little") + text


def main(argv: list[str]) -> None:
    height, width = map(int, argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for who asked us, and who ends us by closing stdin
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS
    source, target = sys.stdin.buffer, sys.stdout.fileno()
    files.write_all(target, b"R")
    while line := source.readline():
        for item in json.loads(line):
            files.write_all(target, _answer(item, height, width))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BrokenPipeError:
        os._exit(1)  # the reader is gone
