"""A rank's batches, resident or read ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import product


@pytest.fixture
def shards(tmp_path: Path) -> Any:
    raw = product.source("synthetic", tmp_path, n=101, n_test=3, size=4)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 5)


def test_resident_and_prefetched_batches_are_the_same(shards: Any) -> None:
    first, second = (product.batches(shards, 24, 1, 2, resident=resident) for resident in ("always", "never"))
    assert first.source.resident and not second.source.resident
    batches = list(zip(*(batches.epoch(3, first_step=1) for batches in (first, second))))
    assert len(batches) == 3
    for (a, part), (b, same) in batches:
        assert torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels) and part == same and part.total == 24
        assert torch.equal(a.images[a.rows], b.images[b.rows])


def test_an_epoch_can_be_left_early_and_errors_reach_the_caller(shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = product.batches(shards, 24, resident="never")
    batches = loader.epoch(0)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    monkeypatch.setattr(type(loader.source.samples), "take", lambda self, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader.epoch(0))
