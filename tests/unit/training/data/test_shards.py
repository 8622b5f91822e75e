"""The files that samples are kept in: what is in them, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lockstep.training.data import shard_writer
from lockstep.training.data.shards import Manifest, Samples
from tests import product
from tests.pictures import write_cifar10
from tests.product import UserError


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    raw = product.source("synthetic", tmp_path, n=100, n_test=20, size=4, classes=3)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 3)


def test_a_file_that_is_missing_is_named(manifest: Manifest) -> None:
    (manifest.directory / manifest.splits["train"][1].file).unlink()
    assert len(Samples.open(manifest, "test")) == 20
    with pytest.raises(UserError, match="train-00001"):
        Samples.open(manifest, "train")


@pytest.mark.parametrize("names", [("train",), ("train", "test", "x")])
def test_splits_that_lack_or_are_unknown_are_refused(manifest: Manifest, names: tuple[str, ...]) -> None:
    path = manifest.directory / "manifest.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "splits": dict.fromkeys(names, about["splits"]["train"])}))
    with pytest.raises(UserError, match="splits must have files for train and test"):
        Manifest.read(manifest.directory)


def test_writing_never_touches_what_is_there(tmp_path: Path, manifest: Manifest) -> None:
    before = {path.name: path.read_bytes() for path in manifest.directory.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        product.sharded(manifest.directory, *2 * [(np.ones((9, 4), np.float32), np.arange(9))], ["x"] * 9)
    assert {path.name: path.read_bytes() for path in manifest.directory.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        shard_writer.prepare(product.data(source="digits", root=str(tmp_path / "file")))


@pytest.mark.promise("sources")
def test_data_that_is_replaced_makes_other_shards(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    settings = product.data(source="cifar10", root=str(tmp_path))
    first = product.prepared(settings).checksum
    assert product.prepared(settings).checksum == first
    batch.write_bytes(batch.read_bytes()[:-1] + b"\x01")
    assert product.prepared(settings).checksum != first
