"""The baseline: one blocking all-reduce a parameter, after the backward pass. Nothing overlaps, nothing is merged.

After the PyTorch tutorial "Writing Distributed Applications with PyTorch", `average_gradients`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync, broadcast_module, nbytes, trainable


class AllReduce(GradientSync):
    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world, self._trainable = model, world, trainable(model)
        broadcast_module(model)
        return model

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # only `synchronize` sends

    def synchronize(self) -> None:
        for parameter in self._trainable:
            if parameter.grad is None:  # not used on this rank; the others may have used it
                parameter.grad = torch.zeros_like(parameter)
            if self.world.size > 1:
                dist.all_reduce(parameter.grad)
                self.bytes_sent += nbytes(parameter.grad)
