"""Fashion-MNIST's idx files, whole and damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import product
from tests.idx import write_fashion
from tests.product import UserError

RAW = "FashionMNIST/raw"


@pytest.mark.promise("sources")
def test_idx_files(tmp_path: Path) -> None:
    images, labels = write_fashion(tmp_path / RAW, 30, 12)
    raw = product.source("fashion_mnist", tmp_path)
    assert raw.train[0].shape == (30, 28, 28, 1) and raw.test[0].shape == (12, 28, 28, 1) and len(raw.classes) == 10
    assert np.array_equal(raw.train[0][..., 0], images) and np.array_equal(raw.train[1], labels)


TRAIN, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "cut off": (TRAIN, lambda b: b[:-5], TRAIN),
    "of floats": (TRAIN, lambda b: b"\0\0\x0d\x03" + b[4:], TRAIN),
    "huge": (TRAIN, lambda b: b[:4] + b"\x7f\xff\xff\xff" * 3 + b[16:], TRAIN),
    "two labels": (LABELS, lambda b: b[:4] + b"\0\0\0\x02" + b[8:10], r"labels of uint8 \[2\] for 30 samples"),
    "label 10": ("t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has a label 10, and names 10 classes"),
    "of MNIST": (
        LABELS, lambda b: b[:8] + bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]) + b[24:], "holds MNIST, expected"
    ),
}  # fmt: skip


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, kind: str) -> None:
    file, change, named = DAMAGED[kind]
    write_fashion(tmp_path / RAW, 30, 12)
    path = tmp_path / RAW / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=named) as caught:
        product.prepared(product.data(source="fashion_mnist", root=str(tmp_path)))
    assert "\n" not in str(caught.value)
