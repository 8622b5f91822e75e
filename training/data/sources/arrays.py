"""`source: arrays`: a user's own arrays. An .npz or .safetensors file with `samples` and `labels`, or two .npy files.

Samples are uint8 images [n, h, w, c] or float feature vectors [n, f]; labels are whole numbers [n]. No pickle is opened,
and no more than a piece of the samples is in memory.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors
import torch

from lockstep.training import files
from lockstep.training.config.settings import Section
from lockstep.training.config.types import Items
from lockstep.training.contract import UserError
from lockstep.training.data.order import mix
from lockstep.training.data.sources.raw import Piece, Share, Stream, rows_of_a_piece

MOST_SAMPLES = 1 << 28
MOST_SAMPLE = 256 << 20
"""Bytes of one sample: some are in memory at once."""
MOST_PACKED = 16 << 30
"""Bytes of the samples in a compressed .npz, unpacked: a file of 16 MB can claim as much."""
MOST_PACKED_LABELS = 128 << 20
"""The same of the labels, which are in memory as a whole: a file of 128 kB can claim as much."""
_SAMPLES = ("samples", "images")
_KINDS = ("U8", "F16", "F32", "F64")
"""Of samples in a safetensors file."""
_KEY = 0x5EED0001
"""Of the draw that holds samples out."""


class Options(Section):
    train: str = "train.npz"
    """File of the training samples, below `data.root` or absolute: .npz, .safetensors, or .npy beside `train_labels`."""
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


@dataclass(frozen=True, slots=True)
class _Table:
    """One file, or two, that hold samples and labels."""

    shape: tuple[int, ...]
    """Of all samples, [n, …]."""
    sample_bytes: int
    labels: np.ndarray
    pieces: Callable[[int], Iterator[np.ndarray]]
    """The samples in their order, that many rows at once."""


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
            for samples in table.pieces(rows_of_a_piece(table.sample_bytes)):
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


def _open(root: Path, name: str, labels: str | None) -> _Table:
    path = root / name
    suffix = path.suffix.lower()
    if (labels is not None) != (suffix == ".npy"):
        raise UserError(
            f"{path}: an .npy file holds the samples alone, and its labels are named in data.options.train_labels or "
            "test_labels; .npz and .safetensors hold both"
        )
    if suffix == ".npz":
        table = _npz(path)
    elif suffix == ".npy":
        table = _npy(path, root / str(labels))
    elif suffix == ".safetensors":
        table = _safetensors(path)
    else:
        raise UserError(f"{path}: its name does not end in one of .npz, .npy, .safetensors")
    if not table.labels.size:
        raise UserError(f"{path} has no samples")
    return table


def _npz(path: Path) -> _Table:
    files.regular(path).close()

    def opened(archive: zipfile.ZipFile, names: tuple[str, ...], most: int) -> tuple[IO[bytes], int]:
        inside = archive.namelist()
        member = next((f"{name}.npy" for name in names if f"{name}.npy" in inside), None)
        if member is None:
            raise UserError(
                f"{path} has no array {names[0]!r}: expected `samples` and `labels`, it has {sorted(inside)[:10]}"
            )
        about = archive.getinfo(member)
        if about.compress_type != zipfile.ZIP_STORED and about.file_size > most:
            raise UserError(
                f"{path}: {member} has {about.file_size} bytes unpacked, at most {most} are: use np.savez, or .npy"
            )
        return archive.open(about), about.file_size

    def pieces(rows: int) -> Iterator[np.ndarray]:
        with zipfile.ZipFile(path) as archive, opened(archive, _SAMPLES, MOST_PACKED)[0] as file:
            yield from _rows(file, *_head(file, None, path), rows)

    with zipfile.ZipFile(path) as archive:
        samples, size = opened(archive, _SAMPLES, MOST_PACKED)
        with samples:
            shape, dtype = _head(samples, size, path)
        file, size = opened(archive, ("labels",), MOST_PACKED_LABELS)
        with file:
            labels = _labels(file, size, len_of(shape, path), path)
    return _table(shape, dtype, labels, pieces, path)


def _npy(path: Path, labels_path: Path) -> _Table:
    def pieces(rows: int) -> Iterator[np.ndarray]:
        with files.regular(path) as file:
            yield from _rows(file, *_head(file, None, path), rows)

    with files.regular(path) as file:
        shape, dtype = _head(file, os.fstat(file.fileno()).st_size, path)
    with files.regular(labels_path) as file:
        labels = _labels(file, os.fstat(file.fileno()).st_size, len_of(shape, path), labels_path)
    return _table(shape, dtype, labels, pieces, path)


def _safetensors(path: Path) -> _Table:
    files.regular(path).close()

    def pieces(rows: int) -> Iterator[np.ndarray]:
        with safetensors.safe_open(path, framework="numpy") as file:
            samples = file.get_slice(name)
            for low in range(0, shape[0], rows):
                yield samples[low : min(low + rows, shape[0])]  # beyond the end is an error

    with safetensors.safe_open(path, framework="numpy") as file:
        inside = list(file.keys())
        name = next((known for known in _SAMPLES if known in inside), "")
        if not name or "labels" not in inside:
            raise UserError(f"{path}: expected tensors `samples` and `labels`, it has {sorted(inside)[:10]}")
        if (kind := file.get_slice(name).get_dtype()) not in _KINDS:
            raise UserError(f"{path} has samples of {kind}, expected one of {', '.join(_KINDS)}")
        shape = tuple(file.get_slice(name).get_shape())
        count = len_of(shape, path)
        if file.get_slice("labels").get_shape() != [count]:
            raise UserError(
                f"{path} has labels {file.get_slice('labels').get_shape()} for {count} samples, expected [{count}]"
            )
        labels = file.get_tensor("labels")
        dtype = file.get_slice(name)[0:1].dtype if count else np.dtype(np.uint8)
    return _table(shape, dtype, labels, pieces, path)


def len_of(shape: tuple[int, ...], path: Path) -> int:
    """The number of samples. Raises `UserError` for an array without dimensions, or of too many samples."""
    if not shape or shape[0] > MOST_SAMPLES:
        raise UserError(f"{path} has samples {list(shape)}: expected [n, h, w, c] or [n, f], n at most {MOST_SAMPLES}")
    return shape[0]


def _table(shape: tuple[int, ...], dtype: np.dtype[Any], labels: np.ndarray, pieces: Any, path: Path) -> _Table:
    """Raises `UserError` where a single sample is too large to be read."""
    if (size := _bytes(shape, dtype)) > MOST_SAMPLE:
        raise UserError(f"{path} has samples of {size} bytes each, at most {MOST_SAMPLE} are read")
    return _Table(shape, size, labels, pieces)


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape[1:]) * dtype.itemsize


def _head(file: IO[bytes], size: int | None, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
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
    if size is not None and file.tell() + math.prod(shape) * dtype.itemsize != size:
        raise UserError(
            f"{path} says that it holds {dtype} {list(shape)}, and has {size} bytes: it is cut off or corrupt"
        )
    return shape, dtype


def _rows(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], rows: int) -> Iterator[np.ndarray]:
    for low in range(0, shape[0], rows):
        count = min(rows, shape[0] - low)
        data = file.read(count * _bytes(shape, dtype))
        yield np.frombuffer(data, dtype).reshape(count, *shape[1:])


def _labels(file: IO[bytes], size: int, count: int, path: Path) -> np.ndarray:
    shape, dtype = _head(file, size, path)
    if shape != (count,) or dtype.kind not in "ui":
        raise UserError(
            f"{path} has labels of {dtype} {list(shape)} for {count} samples: expected whole numbers [{count}]"
        )
    return np.frombuffer(file.read(count * dtype.itemsize), dtype)
