"""The order as a torch sampler: the tutorial's own cases, the exercise's rule, and the loader's batches."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DistributedSampler

from lockstep.training.data import order
from lockstep.training.data.batches import OrderSampler
from tests.product import UserError

pytestmark = pytest.mark.promise("samplers")

K3_N10 = {
    "drop": [[0, 3, 6], [1, 4, 7], [2, 5, 8]],
    "pad": [[0, 3, 6, 9], [1, 4, 7, 0], [2, 5, 8, 1]],
    "weight": [[0, 3, 6], [1, 4, 7], [2, 5, 8, 9]],
}


@pytest.mark.parametrize("uneven", K3_N10)
def test_three_ranks_and_ten_samples_as_the_tutorial_lists_them(uneven: str) -> None:
    found = [list(OrderSampler(10, 1, rank=rank, world_size=3, shuffle=False, uneven=uneven)) for rank in range(3)]
    assert found == K3_N10[uneven]
    for rank in range(3) if uneven != "weight" else ():  # torch has no such policy
        assert found[rank] == list(DistributedSampler(range(10), 3, rank, shuffle=False, drop_last=uneven == "drop"))


@pytest.mark.parametrize("uneven", ["drop", "pad", "weight"])
def test_the_batches_of_all_ranks_are_those_of_one(uneven: str) -> None:
    one = OrderSampler(50, 12, rank=0, world_size=1, seed=3, uneven=uneven)
    samplers = [OrderSampler(50, 4, rank=rank, world_size=3, seed=3, uneven=uneven) for rank in range(3)]
    for sampler in (one, *samplers):
        sampler.set_epoch(2)
        assert len(list(sampler)) == len(sampler)
    for step in range(one.steps):
        assert torch.equal(torch.cat([sampler.step_ids(step) for sampler in samplers]), one.step_ids(step)), step
    first = list(samplers[0])
    samplers[0].set_epoch(2, step=2)
    assert list(samplers[0]) == first[8:] and len(samplers[0]) == len(first) - 8
    samplers[0].set_epoch(3)
    assert list(samplers[0]) != first


@pytest.mark.parametrize("uneven", ["drop", "pad", "weight"])
def test_the_steps_of_a_long_epoch_are_those_of_the_order_wherever_it_is_entered(uneven: str) -> None:
    sampler = OrderSampler(9000, 11, rank=0, world_size=1, seed=5, uneven=uneven)
    sampler.set_epoch(1)
    for step in (*range(sampler.steps), 0, sampler.steps - 1, 400):
        assert torch.equal(sampler.step_ids(step), order.global_ids(9000, 5, 1, step, 11, uneven)), step
    sampler.set_epoch(2, step=400)
    assert next(iter(sampler)) == order.global_ids(9000, 5, 2, 400, 11, uneven)[0]


def test_what_cannot_be_is_refused() -> None:
    for words in ({"rank": 2, "world_size": 2}, {"uneven": "join"}):
        with pytest.raises(ValueError, match="must be"):
            OrderSampler(10, 1, **words)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="3 samples"):
        OrderSampler(3, 4)
