"""The step clock of every strategy tells two ranks apart: the one that is late waits for nobody, the other one for it."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lockstep.training.parallel.world import World
from tests import product
from tests.ranks import on_ranks

pytestmark = pytest.mark.promise("named-rank")

DELAY, STEPS = 0.06, 8
"""Seconds, well above what a loaded machine adds to one rank alone; steps, of which the first is not looked at."""
NAMES = [name for name in product.strategies() if name != "data_parallel"]
Times = dict[str, float]


class Net(nn.Module):
    """Several layers, and so several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        self.delay = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        x = first(x)
        if self.delay and x.requires_grad:  # in backward, when the gradients of the other layers are on their way
            x.register_hook(self._sleep)
        for layer in others:
            x = layer(torch.tanh(x))
        return x

    def _sleep(self, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay)
        return grad


def _times(world: World, name: str, where: str) -> list[Times]:
    """A rank's phases step by step; rank 1 is late by `DELAY` in its backward pass or in its data."""
    strategy, clock, model = product.strategy(name, bucket_mb=0.001), product.step_clock(), Net()
    network = strategy.wrap(model, world, torch.zeros(2, 24))
    optimizer = strategy.make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    late = DELAY if world.rank == 1 else 0.0
    model.delay = late / 2 if where == "backward" else 0.0  # of each micro-batch
    found: list[Times] = []
    for step in range(STEPS):
        clock.begin()
        time.sleep(late if where == "data" else 0.0)
        clock.data_ready()
        strategy.zero_grad()
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
        for number, piece in enumerate(x.split(3)):
            with strategy.accumulate() if number == 0 else contextlib.nullcontext():
                F.mse_loss(network(piece), piece).backward()
        with clock.synchronizing(strategy.watch):
            strategy.synchronize()
        optimizer.step()
        found.append(clock.end())
    return found[1:]


def _all(world: World) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        for where in ("backward", "data"):
            found[f"{name}, {where}"] = _times(world, name, where)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[Times]]]:
    return on_ranks(_all, 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_late_rank_waits_least_and_its_own_phase_says_why(ranks: Any, name: str) -> None:
    """Rank against rank within a step: what a collective itself takes (up to 20 ms among processes that have just slept,
    more on a slow machine) both of them wait for, so it says nothing of who is late."""
    for where, guilty in (("backward", "grad_ready"), ("data", "data_wait")):
        good, late = (rank[f"{name}, {where}"] for rank in ranks)

        def more(of: list[Times], phase: str, than: list[Times]) -> float:
            return statistics.median(a[phase] - b[phase] for a, b in zip(of, than, strict=True))

        assert more(good, "sync_wait", late) > 0.7 * DELAY, (where, good, late)
        assert more(late, guilty, good) > 0.7 * DELAY, (where, good, late)
        assert min(step[guilty] for step in late) > DELAY, (where, late)
