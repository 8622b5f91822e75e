"""Fashion-MNIST from its official idx files, packed or not (H. Xiao et al., "Fashion-MNIST", 2017)."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np

from lockstep.training import files
from lockstep.training.contract import UserError
from lockstep.training.data.sources.raw import Raw
from lockstep.training.data.sources.raw import download as fetch

CLASSES = [
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
]  # fmt: skip
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UINT8 = 8
_LIMIT = 256 << 20
"""Bytes of one file, unpacked; the official ones have 47 MB. A packed file of 260 KB can hold as much."""


def fashion_mnist(root: Path, download: bool) -> Raw:
    """Images [n, h, w, 1] from the four idx files in `root`, `root/FashionMNIST/raw` or `root/fashion-mnist`.

    Where they are in none of these and `download` allows it, torchvision fetches them. The files hold no code and are
    read as they are; their sizes, counts and labels are checked.
    """
    folder = _folder(root)
    if folder is None:
        if not download:
            raise UserError(
                f"no Fashion-MNIST below {root}: expected {_FILES['train'][0]}[.gz] and the other three idx files; "
                "put them there, or allow the download with data.download=true"
            )
        from torchvision.datasets import FashionMNIST

        fetch(FashionMNIST, "Fashion-MNIST", root, "the four idx files")
        folder = root / "FashionMNIST" / "raw"
    return Raw(_split(folder, *_FILES["train"]), _split(folder, *_FILES["test"]), CLASSES)


def files_of(root: Path) -> list[Path]:
    """The files below `root` that `fashion_mnist` reads; none where they are not there."""
    folder = _folder(root)
    names = [name for pair in _FILES.values() for name in pair] if folder is not None else []
    return [path for name in names if folder is not None and (path := _find(folder, name)) is not None]


def _folder(root: Path) -> Path | None:
    folders = (root, root / "FashionMNIST" / "raw", root / "fashion-mnist")
    return next((place for place in folders if _find(place, _FILES["train"][0])), None)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _split(folder: Path, image_file: str, label_file: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(folder, image_file, 3)
    labels = read_idx(folder, label_file, 1, len(images)).astype(np.int64)
    if len(labels) == 0:
        raise UserError(f"{folder}: {image_file} and {label_file} are empty")
    if labels.max() >= len(CLASSES):
        raise UserError(f"{folder / label_file} has a label {labels.max()}, expected 0 … {len(CLASSES) - 1}")
    return images[..., None], labels


def read_idx(folder: Path, name: str, dimensions: int, count: int | None = None) -> np.ndarray:
    """The uint8 array of an idx file, or of NAME.gz; of `count` elements along its first dimension, where that is known.

    The format: two zero bytes, the element type (8: uint8), the number of dimensions, each size as a big-endian int32,
    then the elements in row-major order.

    Raises:
        UserError: the file is missing, cut off, longer than it says, or of another type or number of dimensions.
    """
    path = _find(folder, name)
    if path is None:
        raise UserError(
            f"{folder / name}[.gz] is missing: Fashion-MNIST has four idx files, images and labels of both splits"
        )
    with (
        files.reading(path),
        files.regular(path) as packed,
        gzip.open(packed) if path.suffix == ".gz" else packed as file,
    ):
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes([0, 0, _UINT8, dimensions]) or len(head) < 4 + 4 * dimensions:
            raise UserError(
                f"{path} is not an idx file of uint8 in {dimensions} dimensions: it is corrupt or another file"
            )
        shape = [int(size) for size in np.frombuffer(head, ">i4", offset=4)]
        size = math.prod(shape)
        if min(shape) < 0 or size > _LIMIT:
            raise UserError(f"{path} says it holds {shape} bytes; at most {_LIMIT} are read: it is corrupt")
        if count is not None and shape[0] != count:
            raise UserError(f"{path} says it holds {shape[0]} labels, and there are {count} images: it is corrupt")
        data = file.read(size + 1)  # one more, to see whether it ends there; a packed file cannot fill the memory
    if len(data) != size:
        actual = "more" if len(data) > size else len(data)
        raise UserError(
            f"{path} has {actual} bytes of data, its header says {shape} = {size}: it is cut off or corrupt"
        )
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)
