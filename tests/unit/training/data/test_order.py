from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training.data import order


@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_permute_is_a_bijection(n: int, secret: int) -> None:
    ids = order.permute(torch.arange(n), n, secret)
    assert torch.equal(ids.sort().values, torch.arange(n))


def test_orders_of_epochs_and_seeds_are_unrelated() -> None:
    n = 50_000
    base = order.permute(torch.arange(n), n, order.key(0, 0, 1)).double()
    for seed, epoch in ((0, 1), (1, 0), (0, 2**20)):
        ids = order.permute(torch.arange(n), n, order.key(seed, epoch, 1)).double()
        assert abs(torch.corrcoef(torch.stack([base, ids]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([base, torch.arange(n).double()]))[0, 1]) < 0.02
    neighbours = (base[1:] - base[:-1]).abs().mean()
    assert abs(neighbours / (n / 3) - 1) < 0.02  # the mean distance of two uniform draws


@given(
    n=st.integers(1, 400), batch=st.integers(1, 100), seed=st.integers(0, 9), epoch=st.integers(0, 9),
    world=st.integers(1, 7), multiple=st.sampled_from([1, 2, 8]), uneven=st.sampled_from(["drop", "pad", "weight"]),
)  # fmt: skip
def test_parts_make_up_the_same_global_batches_at_every_world_size(
    n: int, batch: int, seed: int, epoch: int, world: int, multiple: int, uneven: str
) -> None:
    batch = batch if uneven == "weight" else min(batch, n)
    steps = order.steps_per_epoch(n, batch, uneven)
    epoch_ids = []
    for step in range(steps):
        ids = order.global_ids(n, seed, epoch, step, batch, uneven)
        parts = [ids[slice(*order.bounds(len(ids), rank, world, multiple))] for rank in range(world)]
        assert torch.equal(torch.cat(parts), ids)
        assert all(len(part) % multiple == 0 for part in parts if len(part)) or sum(
            len(part) % multiple != 0 for part in parts
        ) == (len(ids) % multiple != 0)
        epoch_ids += ids.tolist()
    if uneven == "weight":
        assert sorted(epoch_ids) == list(range(n))
    elif uneven == "drop":
        assert len(set(epoch_ids)) == len(epoch_ids) == steps * batch
    else:
        assert set(epoch_ids) == set(range(n)) and len(epoch_ids) == steps * batch
