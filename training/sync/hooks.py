"""One asynchronous all-reduce a parameter, started from inside backward (`hooked.py`), as a strategy of the loop.

With `step: overlapped` the optimizer updates a parameter, and frees its gradient, as soon as the sum is there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from lockstep.training.config import Config
from lockstep.training.config.settings import Section
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import BuildOptimizer, Parameters
from lockstep.training.sync.buckets import Bucketed
from lockstep.training.sync.hooked import HookedDataParallel


class HookOptions(Section):
    step: Literal["after", "overlapped"] = "after"
    """When the optimizer updates a parameter: after the backward pass, or as soon as its gradient is there."""


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
        self.model, self.world = model, world
        self.network = HookedDataParallel(model, scale=1.0, wait=False)  # the loop's losses make the sum the gradient
        self.reducer = self.network.reducer
        return self.network

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        if self.options.step == "overlapped":
            self._refuse_mixing(optimizer)
            self._refuse_normalise_every(getattr(optimizer, "normalise_every", 1))
            self.network.step_when_ready(optimizer)
        return optimizer

    def grad_norm(self, of: Parameters | None = None) -> torch.Tensor:
        self._need_all_gradients()
        return super().grad_norm(of)
