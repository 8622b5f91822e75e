"""A rank's batches, resident or read ahead, and its own slices where `shuffle: shard` has some."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training.data.batches import Batches
from tests import product


@pytest.fixture
def made(tmp_path: Path) -> Any:
    raw = product.source("synthetic", tmp_path, n=101, n_test=3, size=4)
    return product.sharded(tmp_path / "shards", raw.train, raw.test, raw.classes, 5)


def test_resident_and_prefetched_batches_are_the_same(made: Any) -> None:
    one, other = (product.batches(made, 24, 1, 2, resident=resident, prefetch=1) for resident in ("always", "never"))
    assert one.source.resident and not other.source.resident
    batches = list(zip(one.epoch(3, 1), other.epoch(3, 1)))
    assert len(batches) == 3
    for (a, part), (b, same) in batches:
        assert torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels) and part == same and part.total == 24
        assert torch.equal(a.images[a.rows], b.images[b.rows])


def test_an_epoch_can_be_left_early_and_errors_reach_the_caller(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = product.batches(made, 24, resident="never")
    batches = loader.epoch(0)
    next(batches)
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    monkeypatch.setattr(type(loader.source.samples), "take", lambda self, ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(loader.epoch(0))


@pytest.mark.promise("samplers")
@pytest.mark.parametrize(("uneven", "steps"), [("drop", 5), ("weight", 11), ("pad", 11)])
def test_own_slices_are_disjoint_and_of_one_length_in_steps(made: Any, uneven: str, steps: int) -> None:
    """A rank that ended its epoch earlier would leave the others waiting in their next collective for ever."""
    loaders: list[Batches] = [product.batches(made, 12, rank, 3, shuffle="shard", uneven=uneven) for rank in range(3)]
    slices = loaders[0].division.describe_slices()
    assert all(loader.division.describe_slices() == slices for loader in loaders)
    assert [mine["samples"] for mine in slices] == [20, 40, 41]
    seen: list[list[int]] = [[], [], []]
    taken = 0
    for parts in zip(*(loader.epoch(0) for loader in loaders), strict=True):
        taken += 1
        assert len({part.total for _, part in parts}) == 1
        for rank, (batch, _) in enumerate(parts):
            low = sum(mine["samples"] for mine in slices[:rank])
            assert all(low <= number < low + slices[rank]["samples"] for number in batch.ids.tolist()), rank
            seen[rank] += batch.ids.tolist()
        if uneven == "weight":  # who has nothing left takes part all the same, and adds nothing
            assert sum(len(batch) * part.weight for batch, part in parts) == parts[0][1].total
    assert taken == steps == loaders[0].division.steps
    for ids, mine in zip(seen, slices):
        assert mine["samples"] - mine["left_out"] == len(set(ids))


def test_more_ranks_than_files(made: Any) -> None:
    with pytest.raises(product.UserError, match="data.num_shards=6"):
        product.batches(made, 24, 0, 6, shuffle="shard")
