"""What the other strategies are compared with: one blocking all-reduce a parameter, and torch's threads of one process."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from lockstep.training.config import Config
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync, broadcast_module, is_compiled, nbytes, trainable


class AllReduce(GradientSync):
    """One blocking all-reduce a parameter, after the backward pass. Nothing overlaps, nothing is merged.

    After the PyTorch tutorial "Writing Distributed Applications with PyTorch", `average_gradients`.
    """

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self._world, self._trainable = model, world, trainable(model)
        broadcast_module(model)
        return model

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # only `synchronize` sends

    def synchronize(self) -> None:
        for parameter in self._trainable:
            if parameter.grad is None:  # not used on this rank; the others may have used it
                parameter.grad = torch.zeros_like(parameter)
            if self._world.size > 1:
                dist.all_reduce(parameter.grad)
                self.bytes_sent += nbytes(parameter.grad)


class DataParallel(GradientSync):
    """torch's DataParallel: one process, whose threads run a replica a GPU and gather at the first.

    It has no ranks, so it refuses a world above one. Where there is no GPU, or one, it passes everything through.
    """

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
        self.model = model
        # Asked to train on the CPU of a machine with GPUs, torch would still look for the module on the first GPU.
        return model if world.device.type == "cpu" and torch.cuda.is_available() else nn.DataParallel(model)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass  # the replicas' gradients are summed within the backward pass
