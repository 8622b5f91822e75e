"""NCCL's all-reduce over all GPUs: right sums, and its rate beside that of a plain copy over the same links."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lockstep.training.doctor.table import PEERS, Outcome, Place

_ELEMENTS, _SMALL = 64_000_000, 100_003
_TIMES = 10
LEAST = 0.25
"""Of the slowest pair's copies: below it NCCL has chosen another way than the one between the GPUs."""


def all_reduce(place: Place) -> Outcome:
    """Sums whole numbers, so that every order of summation gives the same bits. Collective."""
    world = place.world
    for size in (1, 1000, _SMALL):
        values = torch.arange(size, device=world.device, dtype=torch.float32) % 1000 + world.rank
        dist.all_reduce(values)
        right = (torch.arange(size, dtype=torch.float32) % 1000) * world.size + sum(range(world.size))
        if not torch.equal(values.cpu(), right):
            wrong = int((values.cpu() != right).sum())
            return Outcome("failed", f"{wrong} of {size} sums over {world.size} GPUs are wrong")
    return Outcome("ok", f"sums over {world.size} GPUs are right") if place.rehearsal else _rate(place)


def _rate(place: Place) -> Outcome:
    world = place.world
    data = torch.ones(_ELEMENTS, device=world.device)
    for _ in range(3):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_TIMES):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - began) / _TIMES, device=world.device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    # A ring sends every element 2 (n − 1) / n times over each link.
    bus = data.numel() * 4 * 2 * (world.size - 1) / world.size / float(seconds) / 1e9
    rates = {"all-reduce over the slowest link, GB/s": bus}
    link = place.earlier[PEERS].rates.get("slowest pair, GB/s") if PEERS in place.earlier else None
    if link is None:
        return Outcome("ok", "not compared with the links: no row of them", rates)
    rates["share of a plain copy"] = bus / link
    if bus < LEAST * link:
        return Outcome("failed", f"slower than {LEAST:.0%} of a plain copy between two of these GPUs", rates)
    return Outcome("ok", f"sums over {world.size} GPUs are right", rates)
