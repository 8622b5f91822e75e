"""`shuffle: shard` where the ranks' own files are not of one size: all of them take as many steps as the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.training import config
from lockstep.training.data import shards, sources
from lockstep.training.data.loader import Loader
from lockstep.training.parallel.world import World


@pytest.mark.parametrize(("uneven", "steps"), [("drop", 5), ("weight", 11), ("pad", 11)])
def test_ranks_with_fewer_files_take_as_many_steps(tmp_path: Path, uneven: str, steps: int) -> None:
    """A rank that ended its epoch earlier would leave the others waiting in their next collective for ever."""
    raw = sources.load("synthetic", tmp_path, False, {"n": 101, "n_test": 3, "size": 4})
    made = shards.write(raw, tmp_path / "shards", "synthetic", 5)
    words = [f"data.shards={made.directory}", "data.shuffle=shard", "global_batch_size=12", f"uneven={uneven}"]
    loaded = config.load("smoke", words)
    loaders = [Loader(loaded, World(rank=rank, size=3, local_size=3), made, 12, 1) for rank in range(3)]
    assert [own["samples"] for own in loaders[0].describe_slices()] == [20, 40, 41]
    assert [loader.steps_per_epoch for loader in loaders] == [steps] * 3
    assert [len(list(loader.epoch(0))) for loader in loaders] == [steps] * 3
    for parts in zip(*(loader.epoch(0) for loader in loaders)):
        assert len({part.total for part in parts}) == 1
        if uneven == "weight":  # who has nothing left takes part all the same, and adds nothing
            assert sum(len(part.rows) * part.weight for part in parts) == parts[0].total
