"""The files that samples are kept in: what is in them, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.training.data import shard_writer
from lockstep.training.data.shards import Manifest, Samples
from tests import product
from tests.product import UserError


@pytest.fixture
def made(tmp_path: Path) -> Manifest:
    raw = product.source("synthetic", tmp_path, n=100, n_test=20, size=4, classes=3)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 3)


def test_samples_of_several_files_are_one_range(made: Manifest) -> None:
    samples = Samples.open(made, "train")
    images, labels = samples.all()
    ids = torch.randperm(len(samples))
    taken, its = samples.take(ids)
    assert len(samples) == 100 and torch.equal(taken, images[ids]) and torch.equal(its, labels[ids])
    (made.directory / made.splits["train"][1].file).unlink()
    with pytest.raises(UserError, match="train-00001"):
        Samples.open(made, "train")


@pytest.mark.parametrize("names", [("train",), ("train", "test", "x")])
def test_splits_that_lack_or_are_unknown_are_refused(made: Manifest, names: tuple[str, ...]) -> None:
    path = made.directory / "manifest.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "splits": dict.fromkeys(names, about["splits"]["train"])}))
    with pytest.raises(UserError, match="splits must have files for train and test"):
        Manifest.read(made.directory)


def test_writing_never_touches_what_is_there(tmp_path: Path, made: Manifest) -> None:
    before = {path.name: path.read_bytes() for path in made.directory.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        product.sharded(made.directory, *2 * [(np.ones((9, 4), np.float32), np.arange(9))], ["x"] * 9)
    assert {path.name: path.read_bytes() for path in made.directory.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        shard_writer.prepare(product.data(source="digits", root=str(tmp_path / "file")))


@pytest.mark.promise("sources")
def test_data_that_is_replaced_makes_other_shards(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    batches = [folder / f"{name}.bin" for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]]
    for path in batches:
        path.write_bytes(b"\x03" + bytes(3072))
    settings = product.data(source="cifar10", root=str(tmp_path))
    first = product.prepared(settings).checksum
    assert product.prepared(settings).checksum == first
    batches[1].write_bytes(b"\x03" + bytes(3071) + b"\x01")
    assert product.prepared(settings).checksum != first
