"""Writes small files in the idx format, as Fashion-MNIST has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(head + array.astype(np.uint8).tobytes())


def write_fashion(folder: Path, n: int, n_test: int, patterned: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Four files of random images, or of one bright bar a class. Returns the training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    splits = []
    for split, count in (("train", n), ("t10k", n_test)):
        labels = np.arange(count) % 10
        images = generator.integers(0, 60 if patterned else 256, (count, 28, 28))
        if patterned:
            for image, label in zip(images, labels):
                image[:, 2 * label + 4 : 2 * label + 6] += 180
        write_idx(folder / f"{split}-images-idx3-ubyte", images)
        write_idx(folder / f"{split}-labels-idx1-ubyte", labels)
        splits.append((images, labels))
    return splits[0]
