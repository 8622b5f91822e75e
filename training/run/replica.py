"""The model of a run: as the script wrote it, as the strategy wrapped it, and what optimizes it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.training import sync as strategies
from lockstep.training.checkpoint.state import averaged_buffers
from lockstep.training.config import Sync
from lockstep.training.optim.ema import Ema
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import BuildOptimizer, GradientSync


@dataclass(slots=True)
class Replica:
    model: nn.Module
    network: nn.Module
    sync: GradientSync
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    ema: Ema | None = None

    @classmethod
    def wrap(cls, model: nn.Module, settings: Sync, world: World, example: Any) -> Replica:
        """On the rank's device, with rank 0's weights. Raises `UserError` for a model that the strategy does not support."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"replicate() takes a model, an instance of torch.nn.Module; got {_what(model)}")
        model.to(world.device)
        strategy = strategies.build(settings)
        return cls(model, strategy.wrap(model, world, example), strategy)

    def add_optimizer(self, build: BuildOptimizer, name: str) -> torch.optim.Optimizer:
        if isinstance(build, torch.optim.Optimizer) or not callable(build):
            raise TypeError(
                "optimizer() takes a function that makes the optimizer for the parameters that it gets, such as "
                f"lambda parameters: torch.optim.SGD(parameters, lr=0.1); got {_what(build)}"
            )
        if name in self.optimizers:
            raise ValueError(f"optimizer({name}) was called twice with this name: give the second one another name")
        if self.optimizers and self.sync.settings.name in ("zero1", "fsdp", "hooks", "horovod"):
            raise self.sync.refuse("takes one optimizer", "use sync.name=flat or ddp for several")

        def checked(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = build(parameters)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"the function of optimizer() returns a torch.optim.Optimizer; got {_what(optimizer)}")
            return optimizer

        self.optimizers[name] = self.sync.make_optimizer(checked)
        return self.optimizers[name]

    def averaged(self, decay: float, every: int) -> None:
        if not 0 < decay < 1 or every < 1:
            raise ValueError(f"average() takes a decay in (0, 1) and every from 1, got {decay} and {every}")
        self.ema = Ema(self.model, decay, every, self.sync.duplicate())

    def training(self, optimizers: Iterable[torch.optim.Optimizer]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Inside, a step of these optimizers is computed."""
        return contextlib.nullcontext()

    def zero_grad(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:  # noqa: ARG002
        self.sync.zero_grad()

    @torch.no_grad()
    def for_evaluation(self, world: World) -> nn.Module:
        """A copy with full weights (the average, where there is one) and mean batch statistics. Collective."""
        source = self.ema.average if self.ema else self.model
        model = self.sync.full_module(source)
        buffers = averaged_buffers(model, world)
        model = copy.deepcopy(model) if model is source else model
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return model.eval()


def _what(value: object) -> str:
    """A value as an error names it."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"
