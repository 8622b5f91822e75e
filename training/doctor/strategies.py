"""Each gradient-sync strategy on all GPUs, against one plain process with the whole batch."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training import sync
from lockstep.training.config import Sync
from lockstep.training.doctor.nets import Small
from lockstep.training.doctor.table import Outcome, Place
from lockstep.training.parallel.world import World

STEPS, PER_RANK = 6, 8
EXACT = 1e-3
"""Largest distance of a parameter's way from the plain one, relative to it (L2). Kernels choose the order of their sums by the size
of a batch; a gradient that was not summed, or divided wrongly, is off by a tenth at least."""
LOSSY = {"powersgd": 0.5, "bf16_compress": 0.02}
OPTIONS = {"powersgd": {"rank": 2, "start": 3}}


def contract(place: Place, name: str) -> Outcome:
    """Trains a few steps with that strategy. Collective."""
    world = place.world
    torch.manual_seed(0)
    start = Small().to(world.device)
    expected = _trained(start, None, world)
    actual = _trained(start, sync.build(Sync(name=name, bucket_mb=0.005, options=OPTIONS.get(name, {}))), world)  # type: ignore[arg-type]
    begun = [parameter.detach() for parameter in start.parameters()]
    away = _norm([a - b for a, b in zip(actual, expected)]) / _norm([b - c for b, c in zip(expected, begun)])
    bound = LOSSY.get(name, EXACT)
    how = f"{away:.1e} from one process after {STEPS} steps on {world.size} GPUs"
    return Outcome("ok" if away <= bound else "failed", f"{how}, at most {bound:g}", facts={"distance": away})


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm())


def _trained(start: nn.Module, strategy: sync.base.GradientSync | None, world: World) -> list[torch.Tensor]:
    """The parameters after `STEPS` steps; without a strategy on the whole batch, in this process alone."""
    model = copy.deepcopy(start)
    network: nn.Module = model
    if strategy is None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        network = strategy.wrap(model, world, torch.zeros(2, 3, 16, 16, device=world.device))
        optimizer = strategy.make_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    draw = torch.Generator().manual_seed(1)
    count = PER_RANK * world.size
    for _ in range(STEPS):
        images = torch.randn(count, 3, 16, 16, generator=draw).to(world.device)
        labels = torch.randint(10, (count,), generator=draw).to(world.device)
        if strategy is None:
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
        else:
            strategy.zero_grad()
            rows = slice(world.rank, None, world.size)
            loss = F.cross_entropy(network(images[rows]), labels[rows], reduction="sum")
            (loss * strategy.loss_factor / count).backward()
            strategy.synchronize()
        optimizer.step()
    full = model if strategy is None else strategy.full_module(model)
    return [parameter.detach().clone() for parameter in full.parameters()]
