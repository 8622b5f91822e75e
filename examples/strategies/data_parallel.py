"""torch's DataParallel, to compare with.

lockstep run smoke --ranks 1 --set sync.name=examples.strategies.data_parallel:DataParallel
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync, is_compiled


class DataParallel(GradientSync):
    """torch's DataParallel: one process, whose threads run a replica a GPU and gather at the first.

    It has no ranks, so it refuses a world above one. Where there is no GPU, or one, it passes everything through.
    """

    one_model = True
    compiles = False

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        if world.size > 1:
            refusal = self.refuse(
                f"works in one process, and was started on {world.size} ranks",
                "start one process, or use sync.name=ddp",
            )
            refusal.shared = True
            raise refusal
        if is_compiled(model):
            raise self.refuse(
                "replicates the module in every step, which does not work with torch.compile", "leave one out"
            )
        self.model, self.world = model, world
        # Asked to train on the CPU of a machine with GPUs, torch would still look for the module on the first GPU.
        return model if world.device.type == "cpu" and torch.cuda.is_available() else nn.DataParallel(model)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass  # the replicas' gradients are summed within the backward pass
