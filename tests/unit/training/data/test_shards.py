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
from tests.pictures import write_cifar10
from tests.product import UserError


@pytest.fixture
def made(tmp_path: Path) -> Manifest:
    raw = product.source("synthetic", tmp_path, n=100, n_test=20, size=4, classes=3)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 3)


def test_a_file_that_is_missing_is_named(made: Manifest) -> None:
    (made.directory / made.splits["train"][1].file).unlink()
    assert len(Samples.open(made, "test")) == 20
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
    write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    settings = product.data(source="cifar10", root=str(tmp_path))
    first = product.prepared(settings).checksum
    assert product.prepared(settings).checksum == first
    batch.write_bytes(batch.read_bytes()[:-1] + b"\x01")
    assert product.prepared(settings).checksum != first


def _resident(folder: Path) -> int:
    """Bytes of the files below a folder that this process has in its memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.promise("data-memory")
def test_what_was_read_is_given_back(tmp_path: Path) -> None:
    """64 MB in 4 files: each batch leaves nothing of them in memory."""
    images = np.random.default_rng(0).integers(0, 256, (512, 209, 209, 3), dtype=np.uint8)
    labels = np.arange(512) % 10
    made = product.sharded(tmp_path / "made", (images, labels), (images[:8], labels[:8]), list("0123456789"), 4)
    left = []
    samples = Samples.open(made, "train")
    for ids in torch.randperm(512).split(16):
        taken, its = samples.take(ids)
        left.append(_resident(made.directory))
        assert np.array_equal(taken, images[ids]) and np.array_equal(its, labels[ids])
    assert max(left) < 1 << 20, left
