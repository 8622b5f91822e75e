"""`source: images`: a user's own images in class folders, decoded by the worker processes of torch's DataLoader.

    train/cat/001.jpg   train/cat/more/002.png   train/dog/001.webp

A class is a folder, the classes are sorted by name. The order within a split is that of a hash of each file's relative
name. It mixes the classes, and neither the file system nor other files change it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from ... import files
from ...config import Items, Number
from ...config.settings import Section
from ...contract import UserError, printable
from ...limits import DECODE_SECONDS
from ...parallel.cores import cores
from ..batches import loader
from .raw import Piece, Stream

MAX_SIDE = 4096
_BATCH = 16
"""Images that a worker process decodes at a time."""
_DROPPINGS = frozenset({"thumbs.db", "desktop.ini"})
"""Files of file managers, which are ignored like names with a leading dot."""


def _size(value: int | list[int]) -> list[int]:
    sides = value if isinstance(value, list) else [value, value]
    if len(sides) != 2 or not all(1 <= side <= MAX_SIDE for side in sides):
        raise ValueError(f"must be a number of pixels, or [height, width], of 1 … {MAX_SIDE}, got {value}")
    return sides


Size = Annotated[int | Items[int], AfterValidator(_size)]


class Options(Section):
    size: Size = Field(default=32, validate_default=True)
    """Pixels that an image is scaled to, by its shorter side, and then cut to at its centre: a number, or `[height, width]`."""
    train: str = "train"
    """Folder with one folder for each class, below `data.root` or absolute."""
    test: str | None = None
    """The same for the test images; null: a share of the training images is held out."""
    held_out: Number = Field(default=0.1, ge=0, lt=1)
    """Share of the images that test where there is no test folder, chosen by a hash of each one's relative name."""


@dataclass(frozen=True, slots=True)
class _Image:
    digest: bytes
    """Hash of the file's relative name: it decides the order, and which images are held out."""
    file: Path
    label: int


def open_stream(root: Path, options: Options, workers: int) -> Stream:
    """Returns the images in pieces. After its pieces, a split with a file that is no image raises `UserError`.

    Args:
        workers: processes that decode; 0: one for each core that this process may use.

    Raises:
        UserError: the folders are not what is expected; while it is read, for an image that ends its process or takes too long.
    """
    classes, images = _listed(root / options.train)
    splits = {"train": images}
    if options.test is not None:
        splits["test"] = _listed(root / options.test, classes)[1]
    else:
        tests = [int.from_bytes(image.digest[:8], "big") / 2**64 < options.held_out for image in images]
        for split in ("train", "test"):
            splits[split] = [image for image, held in zip(images, tests) if held == (split == "test")]
    height, width = options.size  # type: ignore[misc]

    def pieces(split: str) -> Generator[Piece, None, None]:
        count, last, broken = len(splits[split]), "the start", dict[Path, str]()
        batches = [range(low, min(low + _BATCH, count)) for low in range(0, count, _BATCH)]
        decode = functools.partial(_results, height=height, width=width)
        try:
            for batch in loader(splits[split], batches, workers or cores(), decode, False, DECODE_SECONDS):  # type: ignore[arg-type]
                good = [(result, image.label) for image, result in batch if not isinstance(result, str)]
                broken |= {image.file: result for image, result in batch if isinstance(result, str)}
                last = batch[-1][0].file
                if good:
                    yield np.stack([result for result, _ in good]), np.array([label for _, label in good])
        except RuntimeError as error:
            raise UserError(
                f"decoding ended ({files.reason_of(error)}): a file soon after {last}, in the order of the shards, did it"
            ) from None
        _refuse(broken, count)

    return Stream(pieces, classes)


def _refuse(broken: dict[Path, str], total: int) -> None:
    if broken:
        first = ", ".join(f"{printable(str(file))} ({reason})" for file, reason in list(broken.items())[:5])
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise UserError(f"{len(broken)} of {total} image files cannot be used: {first}{more}; repair or remove them")


def files_of(root: Path, options: Options) -> list[Path]:
    """Returns the paths of the images; [] if the folders are not what is expected."""
    try:
        return [image.file for name in (options.train, options.test) if name for image in _listed(root / name)[1]]
    except UserError:
        return []


def _listed(folder: Path, classes: list[str] | None = None) -> tuple[list[str], list[_Image]]:
    """Returns the classes and the images below `folder`, in their order.

    Args:
        classes: classes of the training folder, whose labels a test folder shares.

    Raises:
        UserError: as `_files_below`; a file is in no class folder; the class is not in `classes`, or cannot be printed.
    """
    names = [path.relative_to(folder) for path in _files_below(folder)]
    loose = [path for path in names if len(path.parts) == 1 or not path.parts[0].isprintable()]
    _refuse({folder / path: "expected CLASS/NAME, and a class that can be printed" for path in loose}, len(names))
    folders = {path.parts[0] for path in names}
    known = sorted(folders) if classes is None else classes
    if unknown := folders - set(known):
        raise UserError(f"{folder} has a class {min(unknown)!r}, which the training folder does not have")
    hashes = (hashlib.sha256(os.fsencode(path.as_posix())).digest() for path in names)
    images = [_Image(digest, folder / path, known.index(path.parts[0])) for digest, path in zip(hashes, names)]
    return known, sorted(images, key=lambda image: image.digest)


def _files_below(folder: Path) -> list[Path]:
    """Raises `UserError` for a folder that is empty or cannot be read, and for a link to one, which may lead in a circle."""
    try:
        paths = [path for path in folder.iterdir() if path.name[0] != "." and path.name.lower() not in _DROPPINGS]
    except OSError as error:
        raise UserError(
            f"cannot read {folder} ({error.strerror}): expected a folder with one folder for each class"
        ) from None
    if not paths:
        raise UserError(f"{folder} has no images: remove the folder, or put images into it")
    if links := [path for path in paths if path.is_symlink() and path.is_dir()]:
        raise UserError(f"{links[0]} is a link to a folder: replace it by the folder itself")
    return [file for path in sorted(paths) for file in (_files_below(path) if path.is_dir() else [path])]


def _results(images: list[_Image], height: int, width: int) -> list[tuple[_Image, np.ndarray | str]]:
    """Returns each image with its pixels, or the reason why it has none. Runs in a worker process, as its `collate_fn`."""
    results: list[tuple[_Image, np.ndarray | str]] = []
    for image in images:
        try:
            results.append((image, decoded(image.file, height, width)))
        except Exception as error:  # noqa: BLE001 - a damaged file makes the library raise nearly anything
            results.append((image, files.reason_of(error)))
    return results


def decoded(path: Path, height: int, width: int) -> np.ndarray:
    """Returns the pixels of an image file, uint8 RGB [h, w, 3]: upright, scaled to cover h × w, cut at the centre."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings(), files.regular(path) as file:
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)  # a few kilobytes can unpack to gigabytes
        with Image.open(file, formats=("JPEG", "PNG", "WEBP")) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut the values off at 255
                raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}): save it with 8")
            most = 2 * max(height, width)
            image.draft(None, (most, most))  # a large JPEG is unpacked at a half, quarter or eighth
            upright = ImageOps.exif_transpose(image).convert("RGB")
    return np.asarray(ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR))
