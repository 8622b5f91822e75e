"""The baseline: one blocking all-reduce a parameter, after the backward pass. Nothing overlaps, nothing is merged.

After the PyTorch tutorial "Writing Distributed Applications with PyTorch", `average_gradients`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from training.clock import StepClock
from training.sync.base import GradientSync, broadcast_module, nbytes, trained
from training.world import World


class AllReduce(GradientSync):
    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self._world, self._trained = model, world, trained(model)
        broadcast_module(model)
        return model

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # only `finish` sends

    def finish(self, clock: StepClock) -> None:
        clock.grad_ready()
        for parameter in self._trained:
            if parameter.grad is None:  # not used on this rank; the others may have used it
                parameter.grad = torch.zeros_like(parameter)
            if self._world.size > 1:
                dist.all_reduce(parameter.grad)
                self.bytes_sent += nbytes(parameter.grad)
        clock.synced()
