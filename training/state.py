"""All that a checkpoint holds, and how it is gathered from the ranks and given back to them.

A gathered state is `{"shared": …, "ranks": [{"rng", "buffers", "average_buffers", "losses", "sync"}, …]}`: parameters, optimizer
and cursor are the same on all ranks; batch statistics, generators and a strategy's own state are not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.clock import StepClock
from training.contract import UserError
from training.exchange import all_gather_trees, broadcast_tree, gather_trees
from training.optim.ema import Ema
from training.sync.base import GradientSync
from training.world import World


@dataclass(slots=True)
class Cursor:
    """Where the run stands: `step` steps of epoch `epoch` are done. Two integers are all a resume needs."""

    epoch: int = 0
    step: int = 0


@dataclass(slots=True)
class TrainState:
    world: World
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    ema: Ema | None
    cursor: Cursor
    clock: StepClock
    losses: torch.Tensor
    """float64 [2]: the sum of this rank's losses in the current epoch, and the number of samples in it."""
    history: dict[str, Any]
    """Plain values that the run carries along: best and last accuracy, restarts, preemptions."""


def gather(state: TrainState, everywhere: bool = False) -> dict[str, Any] | None:
    """The whole state on rank 0, None elsewhere; with `everywhere`, on all ranks. Collective.

    Its tensors are the live ones: copy them before the next step.
    """
    own: dict[str, Any] = {
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
        "buffers": dict(state.model.named_buffers()),
        "average_buffers": dict(state.ema.average.named_buffers()) if state.ema else {},
        "losses": state.losses,
        "sync": state.sync.state_dict(),
    }
    if state.world.device.type == "cuda":
        own["rng"]["cuda"] = torch.cuda.get_rng_state(state.world.device)
    ranks = all_gather_trees(own, state.world) if everywhere else gather_trees(own, state.world)
    model = dict(state.sync.whole(state.model).named_parameters())
    average = dict(state.sync.whole(state.ema.average).named_parameters()) if state.ema else {}
    optimizer = state.sync.optimizer_state(state.optimizer, everywhere)
    if ranks is None:
        return None
    shared = {
        "model": model,
        "average": average,
        "optimizer": optimizer,
        "cursor": [state.cursor.epoch, state.cursor.step],
        "trained_seconds": state.clock.trained,
        "history": state.history,
    }
    return {"shared": shared, "ranks": ranks}


def scatter(gathered: dict[str, Any] | None, state: TrainState, source: int = 0, resizable: bool = True) -> None:
    """Gives every rank its part of the gathered state that rank `source` read. Collective.

    At another world size than it was saved at, every rank gets the mean of the saved batch statistics; generators keep
    their fresh values, and a strategy makes of the saved ranks' states what it can (`load_resized`).

    Raises:
        UserError: the world size differs from the saved one, and the run is not `resizable`.
    """
    gathered = broadcast_tree(gathered, state.world, source)
    assert gathered is not None
    shared, ranks = gathered["shared"], gathered["ranks"]
    if len(ranks) != state.world.size and not resizable:
        raise UserError(
            f"the run was saved by {len(ranks)} ranks, and with shuffle=shard each keeps its own files: "
            f"resume it on {len(ranks)} ranks, not {state.world.size}"
        )
    _copy(shared["model"], dict(state.model.named_parameters()), state.sync.write)
    state.sync.load_optimizer_state(state.optimizer, shared["optimizer"])
    state.cursor.epoch, state.cursor.step = shared["cursor"]
    state.clock.trained = shared["trained_seconds"]
    state.history.update(shared["history"])
    if state.ema:
        _copy(shared["average"], dict(state.ema.average.named_parameters()), state.sync.write)
    if len(ranks) == state.world.size:
        own = ranks[state.world.rank]
        random.setstate(own["rng"]["python"])
        torch.set_rng_state(own["rng"]["torch"])
        if "cuda" in own["rng"] and state.world.device.type == "cuda":
            torch.cuda.set_rng_state(own["rng"]["cuda"], state.world.device)
        buffers, average_buffers = own["buffers"], own["average_buffers"]
        state.losses.copy_(own["losses"])
        state.sync.load_state_dict(own["sync"])
    else:
        state.losses.copy_(sum(rank["losses"] for rank in ranks) if state.world.leader else torch.zeros(2))
        buffers = mean_of([rank["buffers"] for rank in ranks])
        average_buffers = mean_of([rank["average_buffers"] for rank in ranks])
        state.sync.load_resized([rank["sync"] for rank in ranks])
    _copy(buffers, dict(state.model.named_buffers()))
    if state.ema:
        _copy(average_buffers, dict(state.ema.average.named_buffers()))


def evaluated_weights(gathered: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights that evaluation used: the average where there is one, with batch statistics averaged over the ranks."""
    shared, ranks = gathered["shared"], gathered["ranks"]
    if shared["average"]:
        return {**shared["average"], **mean_of([rank["average_buffers"] for rank in ranks])}
    return {**shared["model"], **mean_of([rank["buffers"] for rank in ranks])}


def mean_of(buffers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean of floating-point buffers by name; of others (counters), rank 0's."""
    means = {}
    for name, first in buffers[0].items():
        if first.is_floating_point():
            means[name] = torch.stack([rank[name].double() for rank in buffers]).mean(0).to(first.dtype)
        else:
            means[name] = first
    return means


@torch.no_grad()
def averaged_buffers(model: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Copies of the model's buffers, averaged over the ranks in one collective. The model keeps its own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    floating = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    if world.size > 1 and floating:
        flat = torch.cat([buffer.reshape(-1).double() for buffer in floating])
        dist.all_reduce(flat)
        flat /= world.size
        for buffer, piece in zip(floating, flat.split([buffer.numel() for buffer in floating])):
            buffer.copy_(piece.view(buffer.shape))
    return buffers


@torch.no_grad()
def _copy(
    saved: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> None:
    if saved.keys() != targets.keys():
        different = sorted(saved.keys() ^ targets.keys())
        raise ValueError(f"the checkpoint is of another model: {different[0]} is in only one of the two")
    for name, target in targets.items():
        if saved[name].shape != target.shape:
            raise ValueError(f"the checkpoint has {name} of shape {list(saved[name].shape)}, not {list(target.shape)}")
        write(target, saved[name])
