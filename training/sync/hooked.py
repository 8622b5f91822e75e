"""A wrapper of our own that does what DDP does: one asynchronous all-reduce a parameter, started from inside backward.

    network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
    F.cross_entropy(network(x), y).backward()   # each gradient is sent as soon as autograd has it
    network.synchronize()                       # and is the mean over the ranks from here on: to clip it, say
    optimizer.step()                            # synchronises by itself where that has not been done

In which order the gradients are sent is the engine's business (`buckets.py`).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from training.sync.base import broadcast_module
from training.sync.buckets import Reducer


def _has_one_of(optimizer: torch.optim.Optimizer, parameters: dict[nn.Parameter, str]) -> bool:
    return any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])


_wrapped: list[weakref.ref[Reducer]] = []
"""In the order in which they were made, which is the same on all ranks."""


def _synchronize_first(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of any optimizer: no rank may step with the gradient of its own part alone.

    As under DDP, every rank runs a backward pass through each wrapped module before the step; where one may not, every
    rank calls `synchronize`.
    """
    alive = {reference: live for reference in _wrapped if (live := reference()) is not None}
    _wrapped[:] = alive
    for reducer in alive.values():
        if reducer.pending and reducer.on_done is None and _has_one_of(optimizer, reducer.names):
            reducer.synchronize()


register_optimizer_step_pre_hook(_synchronize_first)


class HookedDataParallel(nn.Module):
    """Data parallelism around any module, for scripts of one's own. Needs a process group; every rank constructs it.

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size.
    """

    def __init__(self, module: nn.Module, scale: float | None = None) -> None:
        """`scale`: factor of the summed gradients; by default 1/world size, which gives their mean."""
        super().__init__()
        self.module = module
        broadcast_module(module)
        scale = 1 / dist.get_world_size() if scale is None else scale
        self.reducer = Reducer(module.named_parameters(), scale=scale)
        _wrapped.append(weakref.ref(self.reducer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Returns when the gradients are the mean over the ranks.

        An optimizer that has one of the parameters calls it before its step. Call it to clip or read gradients before that.
        """
        self.reducer.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside add to the gradients and send nothing; the next one outside sends the sum."""
        return self.reducer.paused()

    def step_when_ready(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on `optimizer` updates each parameter as soon as its gradient is there, and frees the gradient.

        Its own `step` then does nothing. Set the learning rate before `backward`.
        """
        self.reducer.on_done = lambda parameter: step_one(optimizer, parameter)


@torch.no_grad()
def step_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Updates one parameter and sets its gradient to None. Only for optimizers that treat each parameter independently."""
    groups = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is parameter]
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, groups):
            group["params"] = params
    parameter.grad = None
