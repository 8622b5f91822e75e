"""Sources that need no files: scikit-learn's bundled digits, images from a seed, and scikit-learn's `make_classification`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.training.contract import UserError
from lockstep.training.data.sources.raw import Raw


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


def classification(
    root: Path,  # noqa: ARG001
    download: bool,  # noqa: ARG001
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
    return Raw((samples[:last], labels[:last]), (samples[last:], labels[last:]), [f"class {i}" for i in range(classes)])
