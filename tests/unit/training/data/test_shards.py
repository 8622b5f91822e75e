"""The files that samples are kept in: what is in them, and damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from lockstep.training.data import shards
from lockstep.training.data.shards import Manifest, Samples
from tests import product
from tests.product import UserError


@pytest.fixture
def made(tmp_path: Path) -> Manifest:
    raw = product.source("synthetic", tmp_path, n=100, n_test=20, size=4, classes=3)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 3)


def test_only_the_files_of_the_range_are_opened(made: Manifest) -> None:
    for shard in made.splits["train"][1:]:
        (made.directory / shard.file).unlink()
    first = made.splits["train"][0].count
    assert len(Samples.open(made, "train", 0, first)) == first
    with pytest.raises(UserError, match="train-00001"):
        Samples.open(made, "train", 0, first + 1)


def test_writing_never_touches_what_is_there(tmp_path: Path, made: Manifest) -> None:
    before = {path.name: path.read_bytes() for path in made.directory.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        product.sharded(made.directory, *2 * [(np.ones((9, 4), np.float32), np.arange(9))], ["x"] * 9)
    assert {path.name: path.read_bytes() for path in made.directory.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        shards.prepare(product.data(source="digits", root=str(tmp_path / "file")))


@pytest.mark.promise("sources")
def test_data_that_is_replaced_makes_other_shards(tmp_path: Path) -> None:
    """And without the source's files the shards that were made of them are all there is."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    batches = [folder / f"{name}.bin" for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]]
    for path in batches:
        path.write_bytes(b"\x03" + bytes(3072))
    settings = product.data(source="cifar10", root=str(tmp_path), num_shards=2)
    first = product.prepared(settings).checksum
    assert product.prepared(settings).checksum == first
    batches[1].write_bytes(b"\x03" + bytes(3071) + b"\x01")
    second = product.prepared(settings).checksum
    assert second != first
    shutil.rmtree(folder)
    assert product.prepared(settings).checksum == second


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 2), ("shape", [0, 4, 3]), ("classes", []), ("splits", {}),
        ("splits", {"train": [{"file": "../x.safetensors", "count": 1, "sha256": "0" * 64}], "test": []}),
        ("splits", {"train": [{"file": "x.safetensors", "count": -1, "sha256": "0" * 64}], "test": []}),
    ],
)  # fmt: skip
def test_a_malformed_manifest_is_refused(made: Manifest, key: str, value: object) -> None:
    path = made.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=r"manifest\.json"):
        Manifest.read(made.directory)
