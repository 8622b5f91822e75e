"""Where images come from. A source is one function (root, download, options) → Raw, and one row in `SOURCES`."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle  # only behind an official md5 and a closed list of classes, see `_read_batch`
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from training import settings
from training.contract import UserError

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class Raw:
    """A data set in memory: uint8 images [n, h, w, 3] and int64 labels [n] of both splits."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: list[str]


def digits(root: Path, download: bool) -> Raw:  # noqa: ARG001 - bundled with scikit-learn, so neither is needed
    """The 1797 handwritten digits bundled with scikit-learn, 8×8 upscaled to 3×32×32; every fifth image tests.

    The file lists writers one after the other; taking every fifth image puts each writer into both splits.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = (bunch.images * (255 / 16)).round().astype(np.uint8)
    images = np.repeat(np.repeat(grey, 4, axis=1), 4, axis=2)[..., None].repeat(3, axis=3)
    labels = bunch.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 4
    names = [str(digit) for digit in range(10)]
    return Raw((images[~test], labels[~test]), (images[test], labels[test]), names)


def synthetic(
    root: Path,  # noqa: ARG001
    download: bool,  # noqa: ARG001
    n: int = 4096,
    n_test: int = 1024,
    size: int = 32,
    classes: int = 10,
    seed: int = 0,
    noise: float = 0.5,
) -> Raw:
    """Images generated from the seed: each class is one smooth random pattern, each image that pattern plus noise.

    Args:
        n: training images. n_test: test images. size: height and width in pixels.
        noise: standard deviation of the noise in units of the pattern's.
    """
    if min(n, n_test, size, classes) < 1 or max(n, n_test) * size * size * 3 > 1 << 34 or noise < 0:
        raise UserError("synthetic: n, n_test, size and classes must be at least 1, and the images at most 16 GiB")
    generator = np.random.default_rng(seed)
    coarse = generator.normal(size=(classes, -(-size // 8), -(-size // 8), 3))
    patterns = np.repeat(np.repeat(coarse, 8, axis=1), 8, axis=2)[:, :size, :size].astype(np.float32)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = generator.integers(0, classes, count)
        images = np.empty((count, size, size, 3), np.uint8)
        for start in range(0, count, 4096):
            chosen = labels[start : start + 4096]
            grain = generator.standard_normal((len(chosen), size, size, 3), dtype=np.float32) * noise
            images[start : start + 4096] = np.clip((patterns[chosen] + grain) * 40 + 128, 0, 255)
        return images, labels.astype(np.int64)

    return Raw(draw(n), draw(n_test), [f"class {i}" for i in range(classes)])


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
        _download_cifar10(root)
    return _cifar10_python(folder)


def _cifar10_binary(folder: Path) -> Raw:
    def read(name: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / name
        if not path.exists():
            raise UserError(f"{path} is missing: CIFAR-10 has data_batch_1.bin … data_batch_5.bin and test_batch.bin")
        data = np.fromfile(path, np.uint8)
        if len(data) == 0 or len(data) % _RECORD:
            raise UserError(
                f"{path} has {len(data)} bytes, expected a multiple of {_RECORD}: it is cut off or no CIFAR-10"
            )
        records = data.reshape(-1, _RECORD)
        labels = records[:, 0].astype(np.int64)
        if labels.max() > 9:
            raise UserError(f"{path} has a label {labels.max()}, expected 0 … 9: it is corrupt or no CIFAR-10")
        return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels

    batches = [read(f"data_batch_{number}.bin") for number in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
    return Raw((images, labels), read("test_batch.bin"), CIFAR10_CLASSES)


def _cifar10_python(folder: Path) -> Raw:
    from torchvision.datasets import CIFAR10

    def read(name: str, md5: str) -> tuple[np.ndarray, np.ndarray]:
        path = folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != md5:
            raise UserError(
                f"{path} has md5 {found}, expected the official {md5}: it is a pickle, so another file is not opened; "
                "download it again, or use the binary format (cifar-10-batches-bin/)"
            )
        return _read_batch(data)

    batches = [read(name, md5) for name, md5 in CIFAR10.train_list]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
    return Raw((images, labels), read(*CIFAR10.test_list[0]), CIFAR10_CLASSES)


class _ArraysOnly(pickle.Unpickler):
    """Opens the official batches and refuses every class that they do not need."""

    allowed = frozenset(
        [("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise UserError(f"a CIFAR-10 batch asks for {module}.{name}, which the official files do not")
        if name == "_reconstruct":
            from numpy._core.multiarray import _reconstruct

            return _reconstruct
        return super().find_class(module, name)


def _read_batch(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = _ArraysOnly(io.BytesIO(data), encoding="latin1").load()
    images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch["labels"], np.int64)


def _download_cifar10(root: Path) -> None:
    from torchvision.datasets import CIFAR10

    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        CIFAR10(str(root), download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"no CIFAR-10 below {root}, and the download failed ({_reason(error)}): put cifar-10-batches-bin/ "
            "or cifar-10-batches-py/ there, or point data.root at them"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


SOURCES: dict[str, Callable[..., Raw]] = {"digits": digits, "synthetic": synthetic, "cifar10": cifar10}

GENERATED = frozenset({"digits", "synthetic"})
"""Sources that need no folder of their own."""


def load(name: str, root: Path, download: bool, options: dict[str, Any]) -> Raw:
    """The named source. Raises `UserError` for an unknown option, and for data that is missing or corrupt."""
    source = SOURCES[name]
    known = {
        parameter.name: parameter
        for parameter in list(inspect.signature(source).parameters.values())[2:]
    }  # fmt: skip
    for option, value in options.items():
        if option not in known:
            raise UserError(f"data.options: {name} has no option {option!r}{settings.nearest(option, known)}")
        expected = type(known[option].default)
        if not isinstance(value, expected) and not (expected is float and type(value) is int):
            raise UserError(f"data.options.{option} must be {expected.__name__}, got {value!r}")
    try:
        return source(root, download, **options)
    except PermissionError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; give this user (id {os.getuid()}) the right to"
        ) from None
