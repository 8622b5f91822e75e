"""Two ranks that differ in different places: the first place in the model's order is named, with the rank it is of."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.resilience.closeness import ReplicasDiffer, check_parameter_closeness
from tests.ranks import on_ranks


def _drifted(world: World) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        model[2].weight[0] += world.rank == 1
        model[0].bias[1:] += 2.0 * (world.rank == 2)
    try:
        check_parameter_closeness(model)
    except ReplicasDiffer as error:
        return str(error)
    return "the same"


def test_of_several_differences_the_first_one_is_named_on_every_rank() -> None:
    told = set(on_ranks(_drifted, 3))
    assert len(told) == 1
    assert told.pop().startswith("0.bias on rank 2 differs from rank 0's: by up to 2 in 2 of 3 elements")
