"""The data sets that Lockstep knows: those that it generates, and those that it reads from their official files.

Generated, without files: scikit-learn's bundled digits, images from a seed, and scikit-learn's `make_classification`.
CIFAR-10: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
Fashion-MNIST: H. Xiao et al., "Fashion-MNIST", 2017.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np

from ... import files
from ...config import Count, Positive, Rate
from ...contract import UserError
from .raw import Raw, numbered

_CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_RECORD = 1 + 3 * 32 * 32
_FASHION_MNIST = [
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
]  # fmt: skip
_FIRST_OF_MNIST = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]
"""Its first training labels: the files of both data sets have the same names."""
_UINT8 = 8
_MAX_BYTES = 256 << 20
"""The largest file; the official ones have 47 MB at most."""


def digits() -> Raw:
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
    n: Positive = 4096,
    n_test: Positive = 1024,
    size: Positive = 32,
    classes: Positive = 10,
    seed: Count = 0,
    noise: Rate = 0.5,
) -> Raw:
    """Images generated from the seed: each class is one smooth random pattern, each image that pattern plus noise.

    Args:
        n: training images. n_test: test images. size: height and width in pixels.
        noise: standard deviation of the noise in units of the pattern's.
    """
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

    return Raw(draw(n), draw(n_test), numbered(classes))


def classification(
    n: Positive = 10_000,
    features: Positive = 1024,
    informative: Positive = 512,
    redundant: Count = 512,
    classes: Positive = 32,
    clusters: Positive = 10,
    seed: Count = 0,
) -> Raw:
    """Feature vectors of scikit-learn's `make_classification`; the last tenth tests.

    Args:
        n: samples of both splits together. features: length of a vector, `informative` and `redundant` ones included.
        redundant: features that are linear combinations of informative ones; what is left over is noise.
        clusters: Gaussian clusters a class.
    """
    from sklearn.datasets import make_classification

    try:
        samples, labels = make_classification(
            n_samples=n, n_features=features, n_informative=informative, n_redundant=redundant, n_classes=classes,
            n_clusters_per_class=clusters, random_state=seed,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"classification: {' '.join(str(error).split())}") from None
    samples, labels = samples.astype(np.float32), labels.astype(np.int64)
    last = n - n // 10
    return Raw((samples[:last], labels[:last]), (samples[last:], labels[last:]), numbered(classes))


def cifar10(root: Path) -> Raw:
    """CIFAR-10 from `cifar-10-batches-bin/` below `root`, else from torchvision's `cifar-10-batches-py/`, or downloaded.

    The binary files hold no code and are read as they are. The python batches are pickles: torchvision opens them only where
    their md5 is the official one.
    """
    folder = root / "cifar-10-batches-bin"
    if folder.is_dir():
        batches = [_cifar10_binary(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
        return Raw((images, labels), _cifar10_binary(folder / "test_batch.bin"), _CIFAR10)
    train, test = ((part.data, np.asarray(part.targets, np.int64)) for part in _torchvision("CIFAR10", root))
    return Raw(train, test, _CIFAR10)


def _cifar10_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with files.reading(path):
        data = np.frombuffer(bytearray(files.read(path, _MAX_BYTES)), np.uint8)
        records = data.reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0].astype(np.int64)


def fashion_mnist(root: Path) -> Raw:
    """Images [n, h, w, 1] from the four idx files in torchvision's `FashionMNIST/raw/` below `root`, or downloaded.

    The files hold no code and are read as they are.
    """
    folder = root / "FashionMNIST" / "raw"
    names = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    if not all((folder / name).exists() for name in names):
        _torchvision("FashionMNIST", root)
    images, labels, test_images, test_labels = (read_idx(folder / name) for name in names)
    if labels[: len(_FIRST_OF_MNIST)].tolist() == _FIRST_OF_MNIST:
        raise UserError(
            f"{folder} holds MNIST, expected Fashion-MNIST, whose files have the same names: choose another data.root, or read MNIST "
            "with a function (data.source=package.module:function)"
        )
    return Raw((images[..., None], labels), (test_images[..., None], test_labels), _FASHION_MNIST)


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of an idx file. Raises `UserError` for a file that is missing, damaged or of another type.

    The format has two zero bytes, the element type (8: uint8) and the number of dimensions. Each size follows as a big-endian
    int32, then the elements in row-major order.
    """
    with files.reading(path):
        data = files.read(path, _MAX_BYTES)
        if data[:3] != bytes([0, 0, _UINT8]):
            raise ValueError("it is not an idx file of uint8")
        shape = np.frombuffer(data, ">i4", data[3], offset=4)
        return np.frombuffer(bytearray(data), np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _torchvision(name: str, root: Path) -> list[Any]:
    """Returns the training and the test part of torchvision's data set below `root`, which it downloads if it is not there."""
    from torchvision import datasets

    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        return [getattr(datasets, name)(str(root), train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"no {name} below {root}, and the download failed ({files.reason_of(error)}): put torchvision's folder of it there, "
            "or set data.root to where it is"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)
