"""The data sets that Lockstep knows: those that it generates, and those that it reads from their official files.

Generated, without files: scikit-learn's bundled digits, images from a seed, and scikit-learn's `make_classification`.
CIFAR-10: A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009.
Fashion-MNIST: H. Xiao et al., "Fashion-MNIST", 2017.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle  # only behind an official md5
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ... import files
from ...contract import UserError
from .raw import Raw, numbered

_CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_RECORD = 1 + 3 * 32 * 32
_FASHION_MNIST = [
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
]  # fmt: skip
_FIRST_OF_MNIST = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]
"""Its first training labels: the files of both data sets have the same names."""
_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UINT8 = 8
_MAX_BYTES = 256 << 20
"""The largest file, unpacked; the official ones have 47 MB at most. A packed file of 260 KB can hold as much."""


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

    return Raw(draw(n), draw(n_test), numbered(classes))


def classification(
    n: int = 10_000,
    features: int = 1024,
    informative: int = 512,
    redundant: int = 512,
    classes: int = 32,
    clusters: int = 10,
    seed: int = 0,
) -> Raw:
    """Feature vectors of scikit-learn's `make_classification`; the last tenth tests.

    Args:
        n: samples of both splits together. features: length of a vector, `informative` and `redundant` ones included.
        redundant: features that are linear combinations of informative ones; what is left over is noise.
        clusters: Gaussian clusters a class.
    """
    from sklearn.datasets import make_classification

    if n < 10 or min(features, informative, classes, clusters) < 1 or redundant < 0 or n * features > 1 << 31:
        raise UserError("classification: n must be at least 10, the sizes at least 1, and n · features at most 2³¹")
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


def cifar10(root: Path, download: bool) -> Raw:
    """CIFAR-10 from either distribution format below `root`, or downloaded through torchvision.

    The binary files hold no code and are read as they are (their sizes and labels are checked). The python batches
    are pickles: they are opened only where their md5 is the official one.
    """
    folder = _folder(_cifar10_folder, root, download, "CIFAR-10", "cifar-10-batches-bin/ or cifar-10-batches-py/")
    if (folder / "test_batch.bin").exists():
        batches = [_cifar10_binary(folder / f"data_batch_{number}.bin") for number in range(1, 6)]
        test = _cifar10_binary(folder / "test_batch.bin")
    else:
        from torchvision.datasets import CIFAR10

        *batches, test = (
            _cifar10_python(folder / name, md5) for name, md5 in (*CIFAR10.train_list, *CIFAR10.test_list)
        )
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches))
    return Raw((images, labels), test, _CIFAR10)


def cifar10_files(root: Path) -> list[Path]:
    """The files below `root` that `cifar10` reads; none where they are not there."""
    folder = _cifar10_folder(root)
    return [] if folder is None else sorted(folder.glob("*_batch*"))


def _cifar10_folder(root: Path) -> Path | None:
    binary = (folder for folder in (root / "cifar-10-batches-bin", root) if (folder / "test_batch.bin").exists())
    python = root / "cifar-10-batches-py"
    return next(binary, python if python.exists() else None)


def _cifar10_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    if not path.exists():
        raise UserError(f"{path} is missing: CIFAR-10 has data_batch_1.bin … data_batch_5.bin and test_batch.bin")
    with files.reading(path):
        data = np.frombuffer(bytearray(files.read(path, _MAX_BYTES)), np.uint8)
    if len(data) == 0 or len(data) % _RECORD:
        raise UserError(
            f"{path} has {len(data)} bytes, expected a multiple of {_RECORD}: it is cut off, or not CIFAR-10"
        )
    records = data.reshape(-1, _RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise UserError(f"{path} has a label {labels.max()}, expected 0 … 9: it is corrupt, or not CIFAR-10")
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels


def _cifar10_python(path: Path, md5: str) -> tuple[np.ndarray, np.ndarray]:
    """torchvision unpickles a file that it opens anew after it has looked at its md5; here these are the same bytes."""
    with files.reading(path):
        data = files.read(path, _MAX_BYTES)
    actual = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise UserError(
            f"{path} has md5 {actual}, expected the official {md5}: it is a pickle, so a file with another content is not opened; "
            "download it again, or use the binary format (cifar-10-batches-bin/)"
        )
    batch = pickle.loads(data, encoding="latin1")  # noqa: S301 - these are the official bytes, which hold arrays
    images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch["labels"], np.int64)


def fashion_mnist(root: Path, download: bool) -> Raw:
    """Images [n, h, w, 1] from the four idx files in `root`, `root/FashionMNIST/raw` or `root/fashion-mnist`.

    Where they are in none of these and `download` allows it, torchvision fetches them. The files hold no code and are
    read as they are; their sizes, counts and labels are checked.
    """
    expected = f"{_IDX_FILES['train'][0]}[.gz] and the other three idx files"
    folder = _folder(_idx_folder, root, download, "Fashion-MNIST", expected)
    train, test = (_idx_split(folder, *names) for names in _IDX_FILES.values())
    if train[1][: len(_FIRST_OF_MNIST)].tolist() == _FIRST_OF_MNIST:
        raise UserError(
            f"{folder} holds MNIST, expected Fashion-MNIST, whose files have the same names: choose another data.root, or read MNIST "
            "with a function (data.source=package.module:function)"
        )
    return Raw(train, test, _FASHION_MNIST)


def fashion_mnist_files(root: Path) -> list[Path]:
    """The files below `root` that `fashion_mnist` reads; none where they are not there."""
    folder = _idx_folder(root)
    names = [name for pair in _IDX_FILES.values() for name in pair] if folder is not None else []
    return [path for name in names if folder is not None and (path := _find(folder, name)) is not None]


def _idx_folder(root: Path) -> Path | None:
    folders = (root, root / "FashionMNIST" / "raw", root / "fashion-mnist")
    return next((place for place in folders if _find(place, _IDX_FILES["train"][0])), None)


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _idx_split(folder: Path, image_file: str, label_file: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(folder, image_file, 3)
    labels = read_idx(folder, label_file, 1, len(images)).astype(np.int64)
    if len(labels) == 0:
        raise UserError(f"{folder}: {image_file} and {label_file} are empty")
    if labels.max() >= len(_FASHION_MNIST):
        raise UserError(f"{folder / label_file} has a label {labels.max()}, expected 0 … {len(_FASHION_MNIST) - 1}")
    return images[..., None], labels


def read_idx(folder: Path, name: str, dimensions: int, count: int | None = None) -> np.ndarray:
    """The uint8 array of an idx file, or of NAME.gz; of `count` elements along its first dimension, where that is known.

    The format has two zero bytes, the element type (8: uint8) and the number of dimensions. Each size follows as a big-endian
    int32, then the elements in row-major order.

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
        if min(shape) < 0 or size > _MAX_BYTES:
            raise UserError(f"{path} says it holds {shape} bytes; at most {_MAX_BYTES} are read: it is corrupt")
        if count is not None and shape[0] != count:
            raise UserError(f"{path} says it holds {shape[0]} labels, and there are {count} images: it is corrupt")
        data = file.read(size + 1)  # one more, to see whether it ends there; a packed file cannot fill the memory
    if len(data) != size:
        actual = "more" if len(data) > size else len(data)
        raise UserError(
            f"{path} has {actual} bytes of data, its header says {shape} = {size}: it is cut off or corrupt"
        )
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)


def _folder(find: Callable[[Path], Path | None], root: Path, download: bool, name: str, expected: str) -> Path:
    """The folder of a data set, which torchvision downloads to `root` where `find` finds none and `download` allows it.

    Raises `UserError`, which says what to put where.
    """
    if (folder := find(root)) is not None:
        return folder
    if not download:
        raise UserError(
            f"no {name} below {root}: expected {expected}; put them there, or allow the download with data.download=true"
        )
    from torchvision import datasets

    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        getattr(datasets, name.replace("-", ""))(str(root), download=True)
    except (OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no {name} below {root}, and the download failed ({reason}): put {expected} there, or set data.root to their folder"
        ) from None
    finally:
        socket.setdefaulttimeout(previous)
    downloaded = find(root)
    assert downloaded is not None
    return downloaded
