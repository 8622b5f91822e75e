"""An all-reduce for each parameter, from inside the backward pass: as a strategy, and as a wrapper for any script.

lockstep run smoke --ranks 2 --set sync.name=examples.strategies.hooks:Hooks
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from lockstep.training.parallel.exchange import group_size
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import broadcast_module, on_grad
from lockstep.training.sync.buckets import Bucketed, Reducer


class Hooks(Bucketed):
    """What DDP does, in the open: a hook on each parameter starts an asynchronous all-reduce from inside backward.

    In which order the gradients are sent is the engine's business (`buckets.py`). Its buckets have one parameter each.
    """

    one_model = one_optimizer = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world = model, world
        broadcast_module(model)
        self.reducer = Reducer(model)  # the loop's losses make the sum the gradient
        return model


class HookedDataParallel(nn.Module):
    """What `Hooks` does as a wrapper of any module. Every rank constructs it, after the process group; in one process
    without a group it sends nothing.

        network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
        F.cross_entropy(network(x), y).backward()   # each gradient is the mean over the ranks afterwards
        optimizer.step()                            # any optimizer, also one that is written by hand

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size. As under DDP,
    every rank runs the same backward passes; where one has none in a step, all ranks call `synchronize` in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises `UserError` where the launcher started several ranks, but there is no process group."""
        super().__init__()
        self.module = module
        if group_size() > 1:
            broadcast_module(module)
        self.reducer = Reducer(module, mean=True)
        self._queued = self._complete = False
        for parameter in self.reducer.names:
            on_grad(parameter, self._wait_at_the_end)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._queued = False  # still set if the backward pass before raised an error
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """May stand between `backward` and `step`; the end of `backward` has waited already."""
        if not self._complete:
            self.reducer.synchronize()
        self._complete = False

    def _wait_at_the_end(self, _: nn.Parameter) -> None:
        """`backward` returns when the sums are complete, so that no step can use a rank's own gradient."""
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
