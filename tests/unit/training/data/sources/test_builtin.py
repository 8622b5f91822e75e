"""CIFAR-10's and Fashion-MNIST's files: whole, damaged, and pickles that are not the official ones."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from tests import product
from tests.idx import write_fashion
from tests.pictures import write_cifar10

BINARY, RAW = "cifar-10-batches-bin", "FashionMNIST/raw"
BATCH = f"{BINARY}/data_batch_3.bin"
TRAIN, LABELS = f"{RAW}/train-images-idx3-ubyte", f"{RAW}/train-labels-idx1-ubyte"
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "a batch cut off": (BATCH, lambda b: b[:-5], r"data_batch_3\.bin"),
    "a batch missing": (BATCH, None, r"data_batch_3\.bin"),
    "label 255": (BATCH, lambda b: b"\xff" + b[1:], "has a label 255, and names 10 classes"),
    "images cut off": (TRAIN, lambda b: b[:-5], TRAIN),
    "of floats": (TRAIN, lambda b: b"\0\0\x0d\x03" + b[4:], TRAIN),
    "huge": (TRAIN, lambda b: b[:4] + b"\x7f\xff\xff\xff" * 3 + b[16:], TRAIN),
    "two labels": (LABELS, lambda b: b[:4] + b"\0\0\0\x02" + b[8:10], r"is \(uint8 \[30, 28, 28, 1\], uint8 \[2\]\), expected"),
    "label 10": (f"{RAW}/t10k-labels-idx1-ubyte", lambda b: b[:-1] + b"\x0a", "has a label 10, and names 10 classes"),
    "of MNIST": (
        LABELS, lambda b: b[:8] + bytes([5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5, 3, 6, 1, 7]) + b[24:], "holds MNIST, expected"
    ),
}  # fmt: skip
"""What is damaged → (file, its new content, what the error says). None: the file is missing."""


@pytest.mark.promise("sources")
def test_samples_are_those_of_the_files(tmp_path: Path) -> None:
    record = write_cifar10(tmp_path)[7]
    raw = product.source("cifar10", tmp_path)
    assert raw.train[0].shape == (100, 32, 32, 3) and len(raw.test[1]) == 20 and raw.train[1][7] == record[0]
    assert raw.train[0][7, 2, 5, 1] == record[1 + 1024 + 2 * 32 + 5]  # green, row 2, column 5
    images, labels = write_fashion(tmp_path / RAW, 30, 12)
    raw = product.source("fashion_mnist", tmp_path)
    assert raw.train[0].shape == (30, 28, 28, 1) and raw.test[0].shape == (12, 28, 28, 1) and len(raw.classes) == 10
    assert np.array_equal(raw.train[0][..., 0], images) and np.array_equal(raw.train[1], labels)


@pytest.mark.promise("hostile-files")
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, kind: str) -> None:
    file, change, named = DAMAGED[kind]
    write_cifar10(tmp_path)
    write_fashion(tmp_path / RAW, 30, 12)
    if change is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(product.UserError, match=named) as caught:
        product.prepared(product.data(source="cifar10" if file == BATCH else "fashion_mnist", root=str(tmp_path)))
    assert "\n" not in str(caught.value)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("bomb-went-off"),))  # type: ignore[return-value]


@pytest.mark.promise("hostile-files")
def test_a_pickle_that_is_not_official_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a file missing without a sentence: both are downloaded, which fails here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/nothing")
    for make in (lambda path: None, lambda path: path.write_bytes(pickle.dumps(_Bomb()))):
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir(exist_ok=True)
        make(folder / "data_batch_1")
        with pytest.raises(
            product.UserError, match=rf"no CIFAR10 below {tmp_path}, and the download failed \(.*refused"
        ):
            product.source("cifar10", tmp_path)
    assert not (tmp_path / "bomb-went-off").exists()


def test_python_batches_are_read_where_their_md5_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    generator = np.random.default_rng(1)
    data = generator.integers(0, 256, (30, 3072), dtype=np.uint8)
    text = pickle.dumps({"data": data, "labels": [i % 10 for i in range(30)]}, protocol=2)
    text = text.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")  # as the official files name it
    names = [name for name, _ in CIFAR10.train_list] + ["test_batch"]
    for name in names:
        (folder / name).write_bytes(text)
    md5 = hashlib.md5(text).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5]])
    (folder / "batches.meta").write_bytes(meta := pickle.dumps({"label_names": list("0123456789")}))
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": hashlib.md5(meta).hexdigest()})
    raw = product.source("cifar10", tmp_path)
    assert raw.train[0].shape == (150, 32, 32, 3)
    assert np.array_equal(raw.test[0][4].transpose(2, 0, 1).reshape(-1), data[4]) and raw.test[1][4] == 4
