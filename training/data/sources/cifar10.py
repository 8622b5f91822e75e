"""CIFAR-10 from its official files (A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009)."""

from __future__ import annotations

import hashlib
import io
import pickle  # only behind an official md5 and a closed list of classes, see `_read_batch`
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.training import files
from lockstep.training.contract import UserError
from lockstep.training.data.sources.raw import Raw
from lockstep.training.data.sources.raw import download as fetch

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_RECORD = 1 + 3 * 32 * 32
_MOST_BYTES = 256 << 20
"""Of one file; the official ones have 31 MB."""


def cifar10(root: Path, download: bool) -> Raw:
    """CIFAR-10 from either distribution format below `root`, or downloaded through torchvision.

    The binary files hold no code and are read as they are (their sizes and labels are checked). The python batches
    are pickles: they are opened only where their md5 is the official one.
    """
    for folder in (root / "cifar-10-batches-bin", root):
        if (folder / "test_batch.bin").exists():
            return _cifar10_binary(folder)
    folder = root / "cifar-10-batches-py"
    if not folder.exists():
        if not download:
            raise UserError(
                f"no CIFAR-10 below {root}: expected cifar-10-batches-bin/ or cifar-10-batches-py/; "
                "put one there, or allow the download with data.download=true"
            )
        from torchvision.datasets import CIFAR10

        fetch(CIFAR10, "CIFAR-10", root, "cifar-10-batches-bin/ or cifar-10-batches-py/")
    return _cifar10_python(folder)


def files_of(root: Path) -> list[Path]:
    """The files below `root` that `cifar10` reads; none where they are not there."""
    for folder in (root / "cifar-10-batches-bin", root):
        if (folder / "test_batch.bin").exists():
            return sorted(folder.glob("*_batch*.bin"))
    return sorted((root / "cifar-10-batches-py").glob("*_batch*"))


def _cifar10_binary(folder: Path) -> Raw:
    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / name
        if not path.exists():
            raise UserError(f"{path} is missing: CIFAR-10 has data_batch_1.bin … data_batch_5.bin and test_batch.bin")
        with files.reading(path):
            data = np.frombuffer(bytearray(files.read(path, _MOST_BYTES)), np.uint8)
        if len(data) == 0 or len(data) % _RECORD:
            raise UserError(
                f"{path} has {len(data)} bytes, expected a multiple of {_RECORD}: it is cut off, or not CIFAR-10"
            )
        records = data.reshape(-1, _RECORD)
        labels = records[:, 0].astype(np.int64)
        if labels.max() > 9:
            raise UserError(f"{path} has a label {labels.max()}, expected 0 … 9: it is corrupt, or not CIFAR-10")
        return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels

    batches = [read(f"data_batch_{number}.bin") for number in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
    return Raw((images, labels), read("test_batch.bin"), CLASSES)


def _cifar10_python(folder: Path) -> Raw:
    from torchvision.datasets import CIFAR10

    def read(name: str, md5: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / name
        with files.reading(path):
            data = files.read(path, _MOST_BYTES)
        actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if actual != md5:
            raise UserError(
                f"{path} has md5 {actual}, expected the official {md5}: it is a pickle, so a file with another content is not opened; "
                "download it again, or use the binary format (cifar-10-batches-bin/)"
            )
        return _read_batch(data)

    batches = [read(name, md5) for name, md5 in CIFAR10.train_list]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
    return Raw((images, labels), read(*CIFAR10.test_list[0]), CLASSES)


class _ArraysOnly(pickle.Unpickler):
    """Opens the official batches and refuses every class that they do not need."""

    allowed = frozenset(
        [("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise UserError(f"a CIFAR-10 batch asks for {module}.{name}, which the official files do not ask for")
        if name == "_reconstruct":
            from numpy._core.multiarray import _reconstruct

            return _reconstruct
        return super().find_class(module, name)


def _read_batch(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
    images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch["labels"], np.int64)
