"""The whitening that every rank of a run begins with is that of the data, and not what the network was drawn with."""

from __future__ import annotations

from pathlib import Path

import torch

from lockstep.training import config
from lockstep.training.data.augment import normalise
from lockstep.training.models.whitening import whitening_filters
from lockstep.training.parallel.world import World
from lockstep.training.run import prepare
from tests.ranks import on_ranks


def _filters(world: World, root: str, run: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(the filters that the run begins with, those of the training images)."""
    loaded = config.load("smoke", [f"data.root={root}"])
    p = prepare.prepare(loaded, world, Path(run), fresh=False)
    images = normalise(p.loader.samples.all()[0], loaded.data, torch.float32, False)
    own = p.state.model.whitening.weight.detach().clone()  # type: ignore[union-attr]
    if p.run:
        p.run.close()
    return own, whitening_filters(images)


def test_every_rank_begins_with_the_whitening_of_the_data(data_root: Path, tmp_path: Path) -> None:
    for own, expected in on_ranks(_filters, 2, str(data_root), str(tmp_path / "run")):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
