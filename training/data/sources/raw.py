"""What a source gives, in memory or in pieces, and how one is downloaded."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lockstep.training.contract import UserError
from lockstep.training.data.spool import checked

Piece: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(samples, labels [n]): some of a split, in its order."""
PIECE_BYTES = 4 << 20
"""Of samples that a source hands over at once, about."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A data set in memory: (samples, int64 labels [n]) of both splits.

    Samples are uint8 images [n, h, w, c], or float32 feature vectors [n, f].
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: list[str]

    def stream(self) -> Stream:
        """The same in pieces."""

        def pieces(split: str) -> Generator[Piece, None, None]:
            samples, labels = self.train if split == "train" else self.test
            step = rows_of_a_piece(samples[:1].nbytes)
            for low in range(0, len(labels), step):
                yield samples[low : low + step], labels[low : low + step]

        return Stream(pieces, self.classes)


@dataclass(frozen=True, slots=True)
class Stream:
    """A data set of any size, which comes in pieces."""

    pieces: Callable[[str], Generator[Piece, None, None]]
    """Of the split `train` or `test`, in the order of the samples' ids. An iterator that is left early is closed."""
    classes: list[str] | None
    """Names of the labels; None: they are numbered, up to the largest label."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Name of each file that could not be used, and why. Complete when the pieces of both splits have been read."""

    def gathered(self) -> Raw:
        """The whole, in memory. Raises `UserError` for a split without a sample."""
        splits = []
        for split in ("train", "test"):
            with contextlib.closing(self.pieces(split)) as pieces:
                arrays = [checked(np.array(samples), labels, f"the split {split}") for samples, labels in pieces]
            if not arrays:
                raise UserError(f"the data has no sample for the split {split}")
            samples, labels = zip(*arrays)
            splits.append((np.concatenate(samples), np.concatenate(labels)))
        most = int(max(labels.max() for _, labels in splits))
        return Raw(splits[0], splits[1], self.classes or numbered(most + 1))


def numbered(count: int) -> list[str]:
    """Names of classes that have none."""
    return [f"class {number}" for number in range(count)]


def rows_of_a_piece(sample_bytes: int) -> int:
    return max(PIECE_BYTES // max(sample_bytes, 1), 1)


def download(dataset: Callable[..., Any], name: str, root: Path, files: str) -> None:
    """Lets a class of torchvision download its files to `root`. Raises `UserError` that says where to put `files` instead."""
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        dataset(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no {name} below {root}, and the download failed ({reason}): put {files} there, or set data.root to their folder"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)
