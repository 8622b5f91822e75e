"""`source: images`: a user's own images in class folders, decoded by several processes.

    train/cat/001.jpg   train/cat/more/002.png   train/dog/001.webp

A class is a folder, the classes are sorted by name. The order within a split is that of a hash of each file's relative
name. It mixes the classes, and neither the file system nor other files change it. Links are followed if they lead to
a file below the same folder; links to folders are not. Files that are broken are named and counted, up to a bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from ...config import Items
from ...config.settings import Section
from ...contract import UserError, say
from ...limits import DECODE_PROGRESS_SECONDS
from ...parallel.world import cores
from ..decoders import Decoders, Item
from .raw import Piece, Share, Stream, rows_of_a_piece

MAX_SIDE = 4096
KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
"""Suffix → the format that the content must have."""
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
    max_broken: Share = 0.01
    """Share of the files that may be broken; they are named and left out. Above it, the data is refused."""
    train: str = "train"
    """Folder with one folder for each class, below `data.root` or absolute."""
    test: str | None = None
    """The same for the test images; null: a share of the training images is held out."""
    held_out: Share = 0.1
    """Share of the images that test where there is no test folder, chosen by a hash of each one's relative name."""


@dataclass(slots=True)
class _Listing:
    """The images of a folder."""

    classes: list[str]
    items: list[tuple[bytes, Item]] = field(default_factory=list)
    """(the hash of its relative name, the image), in the order of the hash."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name → why it is not even opened."""

    def __len__(self) -> int:
        return len(self.items) + len(self.refused)


def open_stream(root: Path, options: Options, workers: int) -> Stream:
    """Raises `UserError` where the folders are not what is expected; while it is read, for too many broken files.

    Args:
        workers: processes that decode; 0: one for each core that this process may use.
    """
    folder = _folder(root, options.train)
    training = _listed(folder)
    if options.test is None:
        testing = _Listing(training.classes)
        held = [int.from_bytes(digest[:8], "big") / 2**64 < options.held_out for digest, _ in training.items]
        items = {
            split: [item for (_, item), tests in zip(training.items, held) if tests == (split == "test")]
            for split in ("train", "test")
        }
        if not items["test"] or not items["train"]:
            raise UserError(
                f"{folder}: held_out={options.held_out} of {len(training)} images leaves none for "
                f"{'testing' if items['train'] else 'training'}: change data.options.held_out, or name a folder in data.options.test"
            )
    else:
        testing = _listed(_folder(root, options.test), training.classes, f"{options.test}/")
        items = {"train": [item for _, item in training.items], "test": [item for _, item in testing.items]}
    left_out, total = training.refused | testing.refused, len(training) + len(testing)
    _check_broken(left_out, total, options.max_broken)

    def pieces(split: str) -> Generator[Piece, None, None]:
        height, width = options.size  # type: ignore[misc]
        most = rows_of_a_piece(height * width * 3)
        pixels, labels = bytearray(), []
        next_line = time.monotonic() + DECODE_PROGRESS_SECONDS
        with Decoders(height, width, workers or cores()) as decoders:
            for number, (item, result) in enumerate(decoders.decode(items[split]), 1):
                if time.monotonic() > next_line:
                    say(f"decoding {split} images: {number} of {len(items[split])}", sys.stderr)
                    next_line = time.monotonic() + DECODE_PROGRESS_SECONDS
                if isinstance(result, str):
                    left_out[item.name] = result
                    _check_broken(left_out, total, options.max_broken)
                    continue
                pixels += result
                labels.append(item.label)
                if len(labels) == most:
                    yield _piece(pixels, labels, height, width)
                    pixels, labels = bytearray(), []
            if labels:
                yield _piece(pixels, labels, height, width)

    return Stream(pieces, training.classes, left_out)


def _piece(pixels: bytearray, labels: list[int], height: int, width: int) -> Piece:
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3), np.array(labels, np.int64)


def _check_broken(left_out: dict[str, str], total: int, share: float) -> None:
    """Raises `UserError` if more than a share of all files is unusable."""
    if len(left_out) > share * total:
        first = [f"{name} ({reason})" for name, reason in list(left_out.items())[:5]]
        raise UserError(
            f"{len(left_out)} of {total} image files cannot be used, and data.options.max_broken={share:g} "
            f"allows {int(share * total)}: {', '.join(first)}{' …' if len(left_out) > 5 else ''}"
        )


def files_of(root: Path, options: Options) -> list[Path]:
    """Returns the paths of the images; [] if the folders are missing."""
    paths: list[Path] = []
    for name in (options.train, options.test):
        if name is not None:
            with contextlib.suppress(UserError):
                paths += [item.file for _, item in _listed(_folder(root, name)).items]
    return paths


def _folder(root: Path, name: str) -> Path:
    """Returns a split's folder. Raises `UserError` for a folder that the shards would be written into."""
    folder = root / name
    if (root / "shards").resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"{folder} is the folder where shards are cached (data.root={root}): set data.root to its parent folder"
        )
    return folder


def _listed(folder: Path, classes: list[str] | None = None, prefix: str = "") -> _Listing:
    """Returns all images below the class folders of `folder`.

    Args:
        classes: classes of the training folder, whose labels a test folder shares.
        prefix: prefix of each name in messages.

    Raises:
        UserError: the folder is missing, unreadable, without class folders, or has one that is empty or not in `classes`.
    """
    try:
        inside = folder.resolve(strict=True)
        entries = list(os.scandir(inside))
        class_names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {folder} ({reason}): expected a folder with one folder for each class") from None
    if not class_names:
        raise UserError(f"{folder} has no folders: expected one for each class, with its images")
    if classes is not None and (unknown := sorted(set(class_names) - set(classes))):
        raise UserError(f"{folder} has a class {_shown(unknown[0])}, which the training folder does not have")
    if bad := [name for name in class_names if not name.isprintable()]:
        raise UserError(f"{folder} has a class folder {_shown(bad[0])}: rename it, its name cannot be printed")
    listing = _Listing(classes if classes is not None else class_names)
    for entry in entries:
        if Path(entry.name).suffix.lower() in KINDS and entry.name not in class_names:
            listing.refused[_shown(prefix + entry.name)] = "it is not in a class folder"
    for class_name in class_names:
        if not (files := _files_below(inside / class_name)):
            raise UserError(f"{folder / class_name} has no images: remove the folder, or put images into it")
        label = listing.classes.index(class_name)
        for path in files:
            name = path.relative_to(inside).as_posix()
            shown, expected_format = _shown(prefix + name), KINDS.get(path.suffix.lower())
            if expected_format is None:
                listing.refused[shown] = f"its name does not end in one of {', '.join(KINDS)}"
            elif path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
                listing.refused[shown] = "it is a link that leads out of the folder"
            else:
                digest = hashlib.sha256(os.fsencode(name)).digest()
                listing.items.append((digest, Item(path, label, shown, expected_format, inside)))
    listing.items.sort(key=lambda item: item[0])
    listing.refused = dict(sorted(listing.refused.items()))
    return listing


def _files_below(top: Path) -> list[Path]:
    """Raises `UserError` for a folder that is a link, which may lead anywhere and in a circle, or that cannot be read."""

    def refused(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    files: list[Path] = []
    for folder, inner, names in os.walk(top, onerror=refused):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for path in (Path(folder), *(Path(folder, name) for name in inner)):
            if path.is_symlink():
                raise UserError(f"{path} is a link to a folder: replace it by the folder itself")
        files += [Path(folder, name) for name in names if not name.startswith(".") and name.lower() not in _DROPPINGS]
    return files


def _shown(name: str) -> str:
    """Returns a name for an error or a manifest, as one line."""
    return name if name.isprintable() else ascii(name)
