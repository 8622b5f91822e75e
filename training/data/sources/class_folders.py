"""Images in class folders: which there are, in which order, and which of them test.

    train/cat/001.jpg   train/cat/more/002.png   train/dog/001.webp

A class is a folder, the classes are sorted by name. The order within a split is that of a hash of each file's relative
name: it mixes the classes, and neither the file system nor other files change it. Links are followed where they lead to
a file below the same folder; links to folders are not.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.training.contract import UserError

KINDS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}
"""Suffix → the format that the content must have."""
_DROPPINGS = frozenset({"thumbs.db", "desktop.ini"})
"""What file managers leave, beside names with a leading dot."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One file, sorted by the hash of its name."""

    digest: bytes
    name: str
    """Relative to the folder, with slashes."""
    label: int = field(compare=False)
    path: Path = field(compare=False)
    expected_format: str = field(compare=False)

    @property
    def share(self) -> float:
        """In 0 … 1, drawn from the name alone: those below `held_out` test."""
        return int.from_bytes(self.digest[:8], "big") / 2**64


@dataclass(slots=True)
class Listing:
    folder: Path
    """Without links."""
    classes: list[str]
    entries: list[Entry] = field(default_factory=list)
    """In their order."""
    refused: dict[str, str] = field(default_factory=dict)
    """Name → why it is not even opened."""


def listed(folder: Path, classes: list[str] | None = None) -> Listing:
    """All images below the class folders of `folder`.

    Args:
        classes: those of the training folder, whose labels a test folder shares.

    Raises:
        UserError: it is missing, cannot be read, has no class folder, an empty one, or one that `classes` has not.
    """
    try:
        inside = folder.resolve(strict=True)
        class_names = sorted(
            entry.name for entry in os.scandir(inside) if entry.is_dir() and not entry.name.startswith(".")
        )
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {folder} ({reason}): expected a folder with one folder for each class") from None
    if not class_names:
        raise UserError(f"{folder} has no folders: expected one for each class, with its images")
    if classes is not None and (unknown := sorted(set(class_names) - set(classes))):
        raise UserError(f"{folder} has a class {shown(unknown[0])}, which the training folder does not have")
    if bad := [name for name in class_names if not name.isprintable()]:
        raise UserError(f"{folder} has a class folder {shown(bad[0])}: rename it, its name cannot be printed")
    listing = Listing(inside, classes if classes is not None else class_names)
    for name in os.listdir(inside):
        if Path(name).suffix.lower() in KINDS and name not in class_names:
            listing.refused[shown(name)] = "it is not in a class folder"
    for name in class_names:
        if not _add(inside, name, listing.classes.index(name), listing):
            raise UserError(f"{folder / name} has no images: remove the folder, or put images into it")
    listing.entries.sort()
    listing.refused = dict(sorted(listing.refused.items()))
    return listing


def _add(inside: Path, name: str, label: int, listing: Listing) -> int:
    """Adds what is below a class folder, and returns how many files that is.

    Raises `UserError` for a folder that is a link, which may lead anywhere and in a circle, or that cannot be read.
    """
    left, count = [name], 0
    while left:
        folder = left.pop()
        path = inside / folder
        if path.is_symlink():
            raise UserError(f"{path} is a link to a folder: replace it by the folder itself")
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        for entry in entries:
            if entry.name.startswith(".") or entry.name.lower() in _DROPPINGS:
                continue
            if entry.is_dir():
                left.append(f"{folder}/{entry.name}")
            else:
                count += 1
                _add_file(inside, f"{folder}/{entry.name}", label, listing)
    return count


def _add_file(inside: Path, name: str, label: int, listing: Listing) -> None:
    path = inside / name
    expected_format = KINDS.get(path.suffix.lower())
    if expected_format is None:
        listing.refused[shown(name)] = f"its name does not end in one of {', '.join(KINDS)}"
    elif path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
        listing.refused[shown(name)] = "it is a link that leads out of the folder"
    else:
        digest = hashlib.sha256(os.fsencode(name)).digest()
        listing.entries.append(Entry(digest, name, label, path, expected_format))


def shown(name: str) -> str:
    """A name as an error or a manifest shows it: one line, whatever it is made of."""
    return name if name.isprintable() else ascii(name)
