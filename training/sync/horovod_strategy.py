"""What a Horovod script does (`horovod.py`), as a strategy of the loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.sync import horovod as hvd
from lockstep.training.sync.base import BuildOptimizer
from lockstep.training.sync.buckets import Bucketed


class Horovod(Bucketed):
    averages = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        hvd.adopt(world)
        self.model, self.world = model, world
        hvd.broadcast_parameters(model)
        return model

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        distributed: Any = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        self.reducer = distributed._reducer
        hvd.broadcast_optimizer_state(optimizer)
        return optimizer  # the loop calls `synchronize` before its step
