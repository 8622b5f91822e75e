"""`source: arrays`: a user's own arrays. An .npz file with `samples` and `labels`, or two .npy files.

Samples are uint8 images [n, h, w, c] or float feature vectors [n, f]; labels are whole numbers [n]. numpy reads them, and
unpickles nothing. An .npy file of samples is mapped, so that it may be larger than the memory. An .npz file is not.
"""

from __future__ import annotations

import zipfile
from collections.abc import Generator
from pathlib import Path

import numpy as np
import torch

from ... import files
from ...config import Items
from ...config.settings import Section
from ...contract import UserError
from ..order import mix
from .raw import Piece, Share, Stream, cut

MAX_BYTES = 4 << 30
"""The largest array in an .npz file, unpacked."""
SMALL_BYTES, MAX_RATIO = 256 << 20, 100
"""An array of more bytes is at most this many times as large as its packed form. A file of 4 MB can claim 4 GB."""
_KEY = 0x5EED0001
"""Key of the draw that holds samples out."""


class Options(Section):
    train: str = "train.npz"
    """File of the training samples, below `data.root` or absolute: .npz, or .npy together with `train_labels`."""
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


def open_stream(root: Path, options: Options, workers: int) -> Stream:  # noqa: ARG001 - there is nothing to decode
    """Raises `UserError` for a file that is missing, damaged or of another kind."""
    train = _table(root, options.train, options.train_labels)
    test = None if options.test is None else _table(root, options.test, options.test_labels)
    held = held_out(len(train[1]), options.held_out if test is None else 0)
    if test is None and not 0 < held.sum() < len(held):
        raise UserError(
            f"{root / options.train}: held_out={options.held_out:g} of {len(held)} samples leaves none for "
            f"{'training' if held.any() else 'testing'}: change data.options.held_out, or name a file in data.options.test"
        )

    def pieces(split: str) -> Generator[Piece, None, None]:
        if test is not None:
            yield test if split == "test" else train
            return
        low = 0
        for samples, labels in cut(*train):
            chosen = held[low : low + len(labels)] == (split == "test")
            yield samples[chosen], labels[chosen]
            low += len(labels)

    return Stream(pieces, options.classes)


def files_of(root: Path, options: Options) -> list[Path]:
    """Returns the existing files of the source."""
    names = (options.train, options.train_labels, options.test, options.test_labels)
    return [root / name for name in names if name is not None and (root / name).exists()]


def held_out(count: int, share: float) -> np.ndarray:
    """Returns bool [n]: whether a row tests. A row's draw depends only on its number, so added rows change no other row's draw."""
    return (mix(torch.arange(count) ^ _KEY) < int(share * 2**32)).numpy()


def _table(root: Path, name: str, labels_name: str | None) -> Piece:
    """Returns (samples, labels) of one file, or of two. Raises `UserError` for files that are no arrays, or of different lengths."""
    path = root / name
    if path.suffix.lower() == ".npz" and labels_name is None:
        labels_path = path
        with files.reading(path), files.regular(path) as file, zipfile.ZipFile(file) as archive:
            samples, labels = (_member(archive, member, path) for member in ("samples", "labels"))
    elif path.suffix.lower() == ".npy" and labels_name is not None:
        labels_path = root / labels_name
        samples, labels = _mapped(path), _mapped(labels_path)
    else:
        raise UserError(
            f"{path}: expected an .npz file, or an .npy file, which holds the samples alone, and its labels in "
            "data.options.train_labels or test_labels"
        )
    if not samples.ndim or labels.shape != samples.shape[:1]:
        raise UserError(
            f"{labels_path} has labels {list(labels.shape)}, and {path} samples {list(samples.shape)}: expected [n] and [n, …]"
        )
    return samples, labels


def _mapped(path: Path) -> np.ndarray:
    with files.reading(path):
        files.regular(path).close()  # numpy would wait for a FIFO
        array = np.lib.format.open_memmap(path, mode="r")
        if array.offset + array.nbytes != path.stat().st_size:
            raise UserError(f"{path} is longer than its header says: it is corrupt")
        return array


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    if f"{name}.npy" not in (inside := archive.namelist()):
        raise UserError(f"{path} has no array {name!r}: expected `samples` and `labels`, it has {sorted(inside)[:10]}")
    info = archive.getinfo(f"{name}.npy")
    most = min(MAX_BYTES, max(SMALL_BYTES, MAX_RATIO * info.compress_size))
    if info.file_size > most:
        raise UserError(
            f"{path}: {name}.npy has {info.file_size} bytes unpacked, at most {most} are read: use .npy files"
        )
    with archive.open(f"{name}.npy") as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):
            raise UserError(f"{path}: {name}.npy is longer than its header says: it is corrupt")
        return array
