"""The samples of a source, in memory or in pieces, and the checks that they fit a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...contract import UserError

Piece: TypeAlias = tuple[np.ndarray, np.ndarray]
"""(samples, labels [n]) of a part of a split, in order."""
PIECE_BYTES = 4 << 20
"""Approximate size of a piece of samples."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A data set in memory: (samples, int64 labels [n]) of both splits.

    Samples are uint8 images [n, h, w, c], or float32 feature vectors [n, f].
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: list[str]

    def exercise(self) -> Raw:
        """Returns the first tenth of all samples, for both splits."""
        samples, labels = self.train
        count = max((len(labels) + len(self.test[1])) // 10, 1)
        first = samples[:count], labels[:count]
        return Raw(first, first, self.classes)

    def stream(self) -> Stream:
        """Returns the data set in pieces."""

        def pieces(split: str) -> Generator[Piece, None, None]:
            yield self.train if split == "train" else self.test

        return Stream(pieces, self.classes)


@dataclass(frozen=True, slots=True)
class Stream:
    """A data set of any size, which comes in pieces."""

    pieces: Callable[[str], Generator[Piece, None, None]]
    """Yields the pieces of the split `train` or `test`, in the order of the samples' ids. An iterator that is left early is closed."""
    classes: list[str] | None
    """Names of the labels; None: they are numbered, up to the largest label."""

    def gathered(self) -> Raw:
        """Returns the whole data set in memory. Raises `UserError` for a split without a sample."""
        splits = []
        for split in ("train", "test"):
            with contextlib.closing(self.pieces(split)) as pieces:
                arrays = [checked(np.array(samples), labels, f"the split {split}") for samples, labels in pieces]
            if not arrays:
                raise UserError(f"the data has no sample for the split {split}")
            samples, labels = zip(*arrays)
            splits.append((np.concatenate(samples), np.concatenate(labels)) if len(arrays) > 1 else arrays[0])
        most = int(max(labels.max() for _, labels in splits))
        return Raw(splits[0], splits[1], self.classes or numbered(most + 1))


def numbered(count: int) -> list[str]:
    """Returns names for classes without names: `class 0`, `class 1`, …"""
    return [f"class {number}" for number in range(count)]


def cut(samples: Any, labels: Any) -> Generator[Piece, None, None]:
    """Yields a piece, cut into several if it is large. Checks nothing."""
    fits = isinstance(samples, np.ndarray) and isinstance(labels, np.ndarray) and samples.ndim
    if not fits or samples.shape[:1] != labels.shape:
        yield samples, labels
        return
    rows = max(PIECE_BYTES // max(samples[:1].nbytes, 1), 1)
    for low in range(0, len(labels), rows):
        yield samples[low : low + rows], labels[low : low + rows]


def checked(samples: Any, labels: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint8 images [n, h, w, c] or float32 vectors [n, f], int64 labels [n]) of a piece.

    Raises a `UserError` that begins with `where` for another piece.
    """
    arrays = isinstance(samples, np.ndarray) and isinstance(labels, np.ndarray)
    given = [f"{one.dtype} {list(one.shape)}" if arrays else type(one).__name__ for one in (samples, labels)]
    images = arrays and samples.dtype == np.uint8 and samples.ndim == 4
    if images:
        images = samples.shape[3] <= 4 or samples.shape[1] not in (1, 3)  # else the channels come first
    if (
        not (images or (arrays and samples.dtype.kind == "f" and samples.ndim == 2))
        or not all(0 < size < 1 << 16 for size in samples.shape[1:])
        or (labels.dtype.kind not in "iu" or labels.shape != samples.shape[:1])
    ):
        raise UserError(
            f"{where} is ({', '.join(given)}), expected (uint8 images [n, h, w, c] or float vectors [n, f], whole numbers [n]), "
            "with 1 … 65535 in each dimension but n"
        )
    if not images:
        samples = samples.astype(np.float32, copy=False)
        if not np.isfinite(samples).all():
            row = int(np.flatnonzero(~np.isfinite(samples).all(1))[0])
            raise UserError(f"{where} has a value that is not a finite float32 number, in its sample {row}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < 1 << 16:  # before a cast can wrap them
        raise UserError(f"{where} has labels {labels.min()} … {labels.max()}, expected 0 … 65535")
    return samples, labels.astype(np.int64)
