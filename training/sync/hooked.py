"""A wrapper of our own that does what DDP does: one asynchronous all-reduce a parameter, started from inside backward.

    network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
    F.cross_entropy(network(x), y).backward()   # each gradient is sent as soon as autograd has it, and is the mean afterwards
    optimizer.step()                            # any optimizer, also one that is written by hand

`network.synchronize()` may stand between `backward` and `step`, as in the module; the end of `backward` has waited already.
In which order the gradients are sent is the engine's business (`buckets.py`).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from lockstep.training.parallel.exchange import group_size
from lockstep.training.sync.base import broadcast_module
from lockstep.training.sync.buckets import Reducer
from lockstep.training.sync.watch import on_grad


class HookedDataParallel(nn.Module):
    """Data parallelism around any module, for scripts of one's own. Every rank constructs it, after the process group; in
    one process without a group it sends nothing.

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size. As under DDP,
    every rank runs the same backward passes; where one has none in a step, all ranks call `synchronize` in each step.
    """

    def __init__(self, module: nn.Module, scale: float | None = None, wait: bool = True) -> None:
        """
        Args:
            scale: factor of the summed gradients; by default 1/world size, which gives their mean.
            wait: `backward` returns when the sums are complete, so that no step can use a rank's own gradient. Else
                only `synchronize` waits for them.

        Raises:
            UserError: the launcher started several ranks, but there is no process group.
        """
        super().__init__()
        self.module = module
        if group_size() > 1:
            broadcast_module(module)
        self.reducer = Reducer(module.named_parameters(), factor=1.0 if scale is None else scale, mean=scale is None)
        self._waits, self._queued, self._complete = wait, False, False
        for parameter in self.reducer.names if wait else ():
            on_grad(parameter, self._wait_at_the_end)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._queued = False  # still set if the backward pass before raised an error
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Returns when the gradients are the mean over the ranks."""
        if not self._complete:
            self.reducer.synchronize()
        self._complete = False

    def _wait_at_the_end(self, _: nn.Parameter) -> None:
        if not self._queued and not self.reducer.paused_now:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._queued = False
        self.reducer.synchronize()
        self._complete = True

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
