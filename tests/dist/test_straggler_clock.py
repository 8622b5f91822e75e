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

from tests.dist.test_sync_contract import CASES, RANKLESS
from tests.ranks import on_ranks
from training import sync
from training.clock import StepClock, Times
from training.world import World

DELAY, STEPS = 0.06, 4
"""Seconds, well above what a loaded machine adds; steps, of which the first is not looked at."""
NAMES = [name for name in CASES if name not in RANKLESS]


class Net(nn.Module):
    """Several layers (and so several buckets) and a part that no sample uses."""

    def __init__(self, spare: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        self.spare = nn.Linear(3, 3) if spare else None
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


def _times(world: World, name: str, where: str) -> Times:
    """Medians of a rank's phases; rank 1 is late by `DELAY` in its backward pass or in its data."""
    strategy, clock = sync.build(CASES[name]), StepClock()
    model = Net(spare="find_unused" in name)
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
        strategy.finish(clock)
        optimizer.step()
        found.append(clock.end())
    return {phase: statistics.median(times[phase] for times in found[1:]) for phase in found[0]}


def _all(world: World) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        for where in ("backward", "data"):
            found[f"{name}, {where}"] = _times(world, name, where)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Times]]:
    return on_ranks(_all, 2)


@pytest.mark.parametrize("where", ["backward", "data"])
@pytest.mark.parametrize("name", NAMES)
def test_the_late_rank_waits_least_and_its_own_phase_says_why(ranks: Any, name: str, where: str) -> None:
    good, late = (rank[f"{name}, {where}"] for rank in ranks)
    assert good["sync_wait"] > 0.7 * DELAY, (good, late)
    assert late["sync_wait"] < 0.3 * good["sync_wait"], (good, late)
    guilty = "grad_ready" if where == "backward" else "data_wait"
    assert late[guilty] > DELAY and good[guilty] < 0.5 * DELAY, (good, late)
