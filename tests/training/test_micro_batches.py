"""A batch in micro-batches trains what the whole batch trains: a factor that all world sizes share would show nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.training import config
from lockstep.training.parallel.world import World
from lockstep.training.run import prepare
from lockstep.training.run.recipe import make_trainer
from tests.ranks import on_ranks


def _four_steps(world: World, base: list[str], run: str) -> dict[int, torch.Tensor]:
    found = {}
    for accumulate in (1, 2, 3):
        loaded = config.load("smoke", [*base, f"accumulate={accumulate}"])
        p = prepare.prepare(loaded, world, Path(run) / str(accumulate), fresh=False)
        trainer = make_trainer(p)
        for number in range(4):
            p.state.cursor.step = number
            trainer.step(p.loader.resident_batch(0, number))
        found[accumulate] = torch.cat([parameter.detach().reshape(-1) for parameter in p.state.model.parameters()])
        if p.run:
            p.run.close()
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_number_of_micro_batches_changes_no_number(reduction: str, data_root: Path, tmp_path: Path) -> None:
    """25 samples divide into neither two nor three equal pieces."""
    base = [
        f"data.root={data_root}", "data.source=synthetic", "data.options={n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards=3", "data.resident=always", "augment.crop=1", "model=tests.nets:SmallConv", "model_options={}",
        "global_batch_size=25", "uneven=weight", "precision=float64", "ema.decay=0", f"loss.reduction={reduction}",
        "optim.name=sgd", "lr=0.002", "bias_lr_factor=1", "weight_decay=0", "schedule=[]",
    ]  # fmt: skip
    (found,) = on_ranks(_four_steps, 1, base, str(tmp_path))
    for accumulate in (2, 3):
        assert (found[accumulate] - found[1]).abs().max() < 1e-12
