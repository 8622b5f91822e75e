"""One all-reduce for each parameter, after the backward pass: where to begin reading.

lockstep run smoke --ranks 2 --set sync.name=examples.strategies.allreduce:AllReduce
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync, broadcast_module, in_memory, nbytes, stands_for_none, trainable


class AllReduce(GradientSync):
    """One blocking all-reduce a parameter, after the backward pass. Nothing overlaps, nothing is merged.

    After the PyTorch tutorial "Writing Distributed Applications with PyTorch", `average_gradients`.
    """

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world = model, world
        broadcast_module(model)
        return model

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # only `synchronize` sends

    def synchronize(self) -> None:
        for parameter in trainable(self.model) if self.world.size > 1 else ():
            if is_lacking := parameter.grad is None:  # not used on this rank; the others may have used it
                parameter.grad = torch.full_like(parameter, -0.0)
            elif not parameter.grad.is_sparse:
                in_memory(parameter.grad)[:1] += 0.0  # makes 0.0 of -0.0
            dist.all_reduce(parameter.grad)
            self.bytes_sent += nbytes(parameter.grad)
            if is_lacking and bool(stands_for_none(in_memory(parameter.grad)[:1]).all()):
                parameter.grad = None
