"""torch's DataParallel: one process, whose threads run a replica a GPU and gather at the first. For comparison.

It has no ranks, so it refuses a world above one. Where there is no GPU, or one, it passes everything through.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from lockstep.training.config import Config
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync, is_compiled


class DataParallel(GradientSync):
    def check(self, config: Config, world: World) -> None:
        self._refuse(world, config.compile)

    def _refuse(self, world: World, compiled: bool) -> None:
        if world.size > 1:
            raise self.refuse(
                f"works in one process, and was started on {world.size} ranks",
                "start one process, or use sync.name=ddp",
            )
        if compiled:
            raise self.refuse(
                "replicates the module in every step, which does not work with compile=true", "leave one out"
            )

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self._refuse(world, is_compiled(model))
        self.model, self.world = model, world
        # Asked to train on the CPU of a machine with GPUs, torch would still look for the module on the first GPU.
        return model if world.device.type == "cpu" and torch.cuda.is_available() else nn.DataParallel(model)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass  # the replicas' gradients are summed within the backward pass
