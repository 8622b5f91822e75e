from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from tests import product
from tests.pictures import write_cifar10
from tests.product import UserError


@pytest.mark.promise("sources")
def test_binary_files(tmp_path: Path) -> None:
    record = write_cifar10(tmp_path)[7]
    raw = product.source("cifar10", tmp_path)
    assert raw.train[0].shape == (100, 32, 32, 3) and len(raw.test[1]) == 20 and raw.train[1][7] == record[0]
    assert raw.train[0][7, 2, 5, 1] == record[1 + 1024 + 2 * 32 + 5]  # green, row 2, column 5


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), r"data_batch_3\.bin"),
        (lambda p: p.unlink(), r"data_batch_3\.bin"),
        (lambda p: p.write_bytes(b"\xff" + p.read_bytes()[1:]), "has a label 255, and names 10 classes"),
    ],
    ids=["cut off", "missing", "a label of 255"],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Callable[[Path], object], named: str) -> None:
    write_cifar10(tmp_path)
    damage(tmp_path / "cifar-10-batches-bin/data_batch_3.bin")
    with pytest.raises(UserError, match=named):
        product.prepared(product.data(source="cifar10", root=str(tmp_path)))


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
        with pytest.raises(UserError, match=rf"no CIFAR10 below {tmp_path}, and the download failed \(.*refused"):
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
