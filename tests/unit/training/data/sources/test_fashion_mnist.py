"""idx files, plain and packed."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import product
from tests.idx import write_fashion
from tests.product import UserError


@pytest.mark.promise("sources")
@pytest.mark.parametrize(("folder", "packed"), [("", False), ("FashionMNIST/raw", True), ("fashion-mnist", False)])
def test_idx_files_packed_or_not(tmp_path: Path, folder: str, packed: bool) -> None:
    images, labels = write_fashion(tmp_path / folder, 30, 12, packed)
    raw = product.source("fashion_mnist", tmp_path)
    assert raw.train[0].shape == (30, 28, 28, 1) and raw.test[0].shape == (12, 28, 28, 1) and len(raw.classes) == 10
    assert np.array_equal(raw.train[0][..., 0], images) and np.array_equal(raw.train[1], labels)


TRAIN = "train-images-idx3-ubyte"
DAMAGED: dict[str, tuple[str, bool, Callable[[bytes], bytes]]] = {
    "cut off": (TRAIN, False, lambda b: b[:-5]),
    "of floats": (TRAIN, False, lambda b: b"\0\0\x0d\x03" + b[4:]),
    "huge": (TRAIN, False, lambda b: b[:4] + b"\x7f\xff\xff\xff" * 3 + b[16:]),
    "two labels": ("train-labels-idx1-ubyte", False, lambda b: b[:4] + b"\0\0\0\x02" + b[8:10]),
    "label 10": ("t10k-labels-idx1-ubyte", False, lambda b: b[:-1] + b"\x0a"),
    "packed, cut off": (TRAIN, True, lambda b: b[:-20]),
    "of MNIST": (
        "train-labels-idx1-ubyte", False, lambda b: b[:8] + bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]) + b[24:]
    ),
    "packed, without end": (TRAIN, True, lambda b: gzip.compress(gzip.decompress(b) + bytes(1 << 20))),
}  # fmt: skip


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, kind: str) -> None:
    file, packed, change = DAMAGED[kind]
    write_fashion(tmp_path, 30, 12, packed)
    path = tmp_path / (f"{file}.gz" if packed else file)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(
        UserError, match="holds MNIST, expected" if kind == "of MNIST" else file.split("-")[0]
    ) as caught:
        product.source("fashion_mnist", tmp_path)
    assert "\n" not in str(caught.value)
