"""`source: arrays`: a user's own arrays. An .npz file with `samples` and `labels`, or two .npy files.

Samples are uint8 images [n, h, w, c] or float feature vectors [n, f]; labels are whole numbers [n]. No pickle is opened,
and no more than a piece of the samples is in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ... import files
from ...config.sections import Items
from ...config.settings import Section
from ...contract import UserError
from ..order import mix
from .raw import Piece, Share, Stream, rows_of_a_piece

MOST_SAMPLE = 256 << 20
"""Bytes of one sample: some are in memory at once."""
MOST_PACKED = 16 << 30
"""Bytes of the samples in a compressed .npz, unpacked: a file of 16 MB can claim as much."""
MOST_PACKED_LABELS = 128 << 20
"""The same of the labels, which are in memory as a whole: a file of 128 kB can claim as much."""
_KEY = 0x5EED0001
"""Of the draw that holds samples out."""


class Options(Section):
    train: str = "train.npz"
    """File of the training samples, below `data.root` or absolute: .npz, or .npy beside `train_labels`."""
    train_labels: str | None = None
    """File of their labels, where `train` is an .npy file."""
    test: str | None = None
    """The same for the test samples; null: a share of the training samples is held out."""
    test_labels: str | None = None
    """The same for their labels."""
    held_out: Share = 0.1
    """Share of the samples that test where there is no test file, chosen by a hash of each one's row number."""
    classes: Items[str] | None = None
    """Names of the labels; null: they are numbered."""


Opened = contextlib.AbstractContextManager[tuple[IO[bytes], int]]


@dataclass(frozen=True, slots=True)
class _Table:
    """One file, or two, that hold samples and labels."""

    samples: Callable[[], Opened]
    """Opens the .npy file of the samples: (the file, its bytes)."""
    sample_bytes: int
    labels: np.ndarray
    path: Path

    def pieces(self) -> Iterator[np.ndarray]:
        """The samples in their order."""
        rows = rows_of_a_piece(self.sample_bytes)
        with self.samples() as (file, size):
            shape, dtype = _head(file, size, self.path)
            for low in range(0, shape[0], rows):
                count = min(rows, shape[0] - low)
                data = file.read(count * self.sample_bytes)
                yield np.frombuffer(data, dtype).reshape(count, *shape[1:])


def open_stream(root: Path, options: Options, workers: int) -> Stream:  # noqa: ARG001 - there is nothing to decode
    """Raises `UserError` for a file that is missing, damaged or of another kind."""
    with files.reading(root / options.train):
        train = _open(root, options.train, options.train_labels)
    test = None
    if options.test is not None:
        with files.reading(root / options.test):
            test = _open(root, options.test, options.test_labels)
    held = held_out(len(train.labels), options.held_out if test is None else 0)
    if test is None and not 0 < held.sum() < len(held):
        raise UserError(
            f"{root / options.train}: held_out={options.held_out:g} of {len(held)} samples leaves none for "
            f"{'training' if held.any() else 'testing'}: change data.options.held_out, or name a file in data.options.test"
        )

    def pieces(split: str) -> Generator[Piece, None, None]:
        table, name = (test, options.test) if split == "test" and test is not None else (train, options.train)
        low = 0
        with files.reading(root / str(name)):
            for samples in table.pieces():
                labels = table.labels[low : low + len(samples)]
                if test is None:
                    chosen = held[low : low + len(samples)] == (split == "test")
                    yield samples[chosen], labels[chosen]
                else:
                    yield samples, labels
                low += len(samples)

    return Stream(pieces, options.classes)


def files_of(root: Path, options: Options) -> list[Path]:
    """The files that there are."""
    names = (options.train, options.train_labels, options.test, options.test_labels)
    return [root / name for name in names if name is not None and (root / name).exists()]


def held_out(count: int, share: float) -> np.ndarray:
    """bool [n]: which rows test. A row's draw depends on its number alone, so rows that are added change no other's."""
    return (mix(torch.arange(count) ^ _KEY) < int(share * 2**32)).numpy()


def _open(root: Path, name: str, labels_name: str | None) -> _Table:
    """Raises `UserError` for files that are no arrays, or that claim more than is read."""
    path = root / name
    labels_path = path if labels_name is None else root / labels_name
    samples: Callable[[], Opened]
    labels_file: Callable[[], Opened]
    if path.suffix.lower() == ".npz" and labels_name is None:
        samples, labels_file = (
            partial(_member, path, "samples", MOST_PACKED),
            partial(_member, path, "labels", MOST_PACKED_LABELS),
        )
    elif path.suffix.lower() == ".npy" and labels_name is not None:
        samples, labels_file = partial(_plain, path), partial(_plain, labels_path)
    else:
        raise UserError(
            f"{path}: expected an .npz file, or an .npy file, which holds the samples alone, and its labels in "
            "data.options.train_labels or test_labels"
        )
    with samples() as (file, size):
        shape, dtype = _head(file, size, path)
    sample_bytes = math.prod(shape[1:]) * dtype.itemsize
    if sample_bytes > MOST_SAMPLE:
        raise UserError(f"{path} has samples of {sample_bytes} bytes each, at most {MOST_SAMPLE} are read")
    if not shape[0]:
        raise UserError(f"{path} has no samples")
    with labels_file() as (file, size):
        labels_shape, labels_dtype = _head(file, size, labels_path)
        if labels_shape != shape[:1] or labels_dtype.kind not in "ui":
            raise UserError(
                f"{labels_path} has labels of {labels_dtype} {list(labels_shape)} for {shape[0]} samples: expected whole numbers "
                f"[{shape[0]}]"
            )
        labels = np.frombuffer(file.read(shape[0] * labels_dtype.itemsize), labels_dtype)
    return _Table(samples, sample_bytes, labels, path)


@contextlib.contextmanager
def _plain(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    with files.regular(path) as file:
        yield file, os.fstat(file.fileno()).st_size


@contextlib.contextmanager
def _member(path: Path, name: str, most: int) -> Iterator[tuple[IO[bytes], int]]:
    """An array of an .npz file; of at most that many bytes where it is packed."""
    with files.regular(path) as file, zipfile.ZipFile(file) as archive:
        if f"{name}.npy" not in (inside := archive.namelist()):
            raise UserError(
                f"{path} has no array {name!r}: expected `samples` and `labels`, it has {sorted(inside)[:10]}"
            )
        about = archive.getinfo(f"{name}.npy")
        if about.compress_type != zipfile.ZIP_STORED and about.file_size > most:
            raise UserError(
                f"{path}: {name}.npy has {about.file_size} bytes unpacked, at most {most} are: use np.savez, or .npy"
            )
        with archive.open(about) as member:
            yield member, about.file_size


def _head(file: IO[bytes], size: int, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """(shape, type) of an .npy file of `size` bytes, which is then at its first element."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise UserError(f"{path} is of .npy version {version}, expected (1, 0) or (2, 0): it is not a plain array")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "uif":
        content = (
            "Python objects, which are not read" if dtype.hasobject else f"{dtype}, expected whole numbers or floats"
        )
        raise UserError(f"{path} holds {content}")
    if fortran and len(shape) > 1:
        raise UserError(f"{path} is in Fortran order: save np.ascontiguousarray of it")
    if min(shape, default=0) < 0:
        raise UserError(f"{path} has the shape {list(shape)} in its header: it is corrupt")
    if not shape:
        raise UserError(f"{path} has samples []: expected [n, h, w, c] or [n, f]")
    if file.tell() + math.prod(shape) * dtype.itemsize != size:
        raise UserError(
            f"{path} says that it holds {dtype} {list(shape)}, and has {size} bytes: it is cut off or corrupt"
        )
    return shape, dtype
