"""Every node has a disk of its own, and rank 0's is behind: all ranks go on from the newest checkpoint that any of them has."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.training import config
from lockstep.training.checkpoint import store
from lockstep.training.parallel.world import World
from tests.events import events
from tests.ranks import on_ranks


def _twice(world: World, base: list[str], folder: str) -> int:
    """Trains an epoch, puts this node's disk a checkpoint back where it is the first one, and trains another epoch."""
    from lockstep.training.run import recipe

    me = dataclasses.replace(world, local_rank=0, local_size=1, node=world.rank, nodes=world.size)
    run = Path(folder) / f"node{world.rank}"
    assert recipe.train(config.load("smoke", [*base, "epochs=1"]), me, run) == 0
    if me.leader:
        newest, before = store.candidates(run / "checkpoints")[:2]
        assert (store.step_of(newest), store.step_of(before)) == (8, 4)
        shutil.rmtree(newest)
    dist.barrier()
    return recipe.train(config.load("smoke", [*base, "epochs=2"]), me, run)


def test_a_rank_0_with_an_older_checkpoint_goes_on_from_the_newest_of_all(data_root: Path, tmp_path: Path) -> None:
    base = [
        f"data.root={data_root}", "data.source=synthetic", "data.options={n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "augment.crop=1", "model=tests.nets:SmallConv", "model_options={}", "global_batch_size=24",
        "uneven=drop", "evaluate.every=1", "checkpoint.write=node", "checkpoint.every_steps=4", "checkpoint.keep=9",
    ]  # fmt: skip
    assert on_ranks(_twice, 2, base, str(tmp_path)) == [0, 0]
    assert [event["step"] for event in events(tmp_path / "node0", "resumed")] == [8]
    one, other = (store.load(tmp_path / f"node{rank}/checkpoints/step-00000016")["shared"]["model"] for rank in (0, 1))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
