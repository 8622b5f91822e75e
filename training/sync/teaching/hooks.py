"""What DDP does, in the open: one asynchronous all-reduce a parameter, started by a hook from inside backward.

`HookedDataParallel` is a wrapper for any script:

    network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
    F.cross_entropy(network(x), y).backward()   # each gradient is sent as soon as autograd has it, and is the mean afterwards
    optimizer.step()                            # any optimizer, also one that is written by hand

`Hooks` is the same as a strategy of the loop. In which order the gradients are sent is the engine's business (`buckets.py`).
"""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch
from torch import nn

from lockstep.training.config import Config
from lockstep.training.config.settings import Section
from lockstep.training.parallel.exchange import group_size
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import BuildOptimizer, Parameters, broadcast_module
from lockstep.training.sync.buckets import Bucketed, Reducer
from lockstep.training.sync.watch import on_grad


class HookedDataParallel(nn.Module):
    """Data parallelism around any module, for scripts of one's own. Every rank constructs it, after the process group; in
    one process without a group it sends nothing.

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size. As under DDP,
    every rank runs the same backward passes; where one has none in a step, all ranks call `synchronize` in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises `UserError` where the launcher started several ranks, but there is no process group."""
        super().__init__()
        self.module = module
        size = group_size()
        if size > 1:
            broadcast_module(module)
        self.reducer = Reducer(module.named_parameters(), scale=1 / size, size=size)
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


class HookOptions(Section):
    step: Literal["after", "overlapped"] = "after"
    """When the optimizer updates a parameter, and frees its gradient: after the backward pass, or as soon as its sum is there."""


class Hooks(Bucketed):
    Options = HookOptions

    def check(self, config: Config, world: World) -> None:  # noqa: ARG002
        if config.optim.clip or config.nonfinite != "ignore" or config.precision == "float16":
            self._need_all_gradients()
        if config.optim.name == "muon":
            self._refuse_normalise_every(config.optim.normalise_every)

    def _need_all_gradients(self) -> None:
        if self.options.step == "overlapped":
            raise self.refuse(
                "with sync.options.step=overlapped has changed weights before all gradients are known",
                "set nonfinite=ignore, optim.clip=0 and a precision other than float16, or sync.options.step=after",
            )

    def _refuse_normalise_every(self, every: int) -> None:
        if self.options.step == "overlapped" and every > 1:
            raise self.refuse(
                f"with sync.options.step=overlapped takes a step a parameter, which Muon's normalise_every={every} would count",
                "set optim.normalise_every=1, or sync.options.step=after",
            )

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model = model
        broadcast_module(model)
        self.reducer = Reducer(model.named_parameters())  # the loop's losses make the sum the gradient
        return model

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        if self.options.step == "overlapped":
            self._refuse_mixing(optimizer)
            self._refuse_normalise_every(getattr(optimizer, "normalise_every", 1))
            self.reducer.on_done = lambda parameter: step_one(optimizer, parameter)
        return optimizer

    def grad_norm(self, of: Parameters | None = None) -> torch.Tensor:
        self._need_all_gradients()
        return super().grad_norm(of)


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
