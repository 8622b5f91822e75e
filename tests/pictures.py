"""Image files in class folders, and as CIFAR-10 has them, made from a seed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bird", "cat", "dog")


def pixels(number: int, height: int = 16, width: int = 16) -> np.ndarray:
    """uint8 [h, w, 3]: of one colour for each class, with some grain."""
    generator = np.random.default_rng(number)
    colour = np.eye(3)[number % len(CLASSES)] * 120 + 60
    return (colour + generator.integers(0, 60, (height, width, 3))).astype(np.uint8)


def write_pictures(folder: Path, count: int, suffix: str = "png", side: int = 16) -> dict[str, int]:
    """`count` images, in turn of each class. Returns relative name → number, which is its class, too, less the multiples."""
    names = {}
    for number in range(count):
        label = number % len(CLASSES)
        name = f"{CLASSES[label]}/{number:05d}.{suffix}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, side, side)).save(folder / name)
        names[name] = number
    return names


def write_cifar10(root: Path, records: int = 20) -> np.ndarray:
    """Six binary files of so many records. Returns all records: a label, then 3 × 32 × 32 pixels."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    every = np.random.default_rng(0).integers(0, 256, (6 * records, 3073), dtype=np.uint8)
    every[:, 0] = np.arange(6 * records) % 10
    for number, name in enumerate([*(f"data_batch_{batch}" for batch in range(1, 6)), "test_batch"]):
        every[number * records : (number + 1) * records].tofile(folder / f"{name}.bin")
    return every


def in_order(names: list[str]) -> list[str]:
    """As the source orders them: by the sha256 of the name."""
    return sorted(names, key=lambda name: (hashlib.sha256(os.fsencode(name)).digest(), name))


def is_held_out(name: str, held_out: float) -> bool:
    """Whether the file is held out."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") / 2**64 < held_out
