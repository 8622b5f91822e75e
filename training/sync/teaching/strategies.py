"""Strategies to learn from, and to compare others with: `allreduce`, `hooks`, `data_parallel`, and a wrapper for any script."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...parallel.exchange import group_size
from ...parallel.world import World
from ..base import (
    GradientSync,
    broadcast_module,
    in_memory,
    is_compiled,
    nbytes,
    stands_for_none,
    trainable,
)
from ..buckets import Bucketed, Reducer
from ..watch import on_grad


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


class Hooks(Bucketed):
    """What DDP does, in the open: a hook on each parameter starts an asynchronous all-reduce from inside backward.

    In which order the gradients are sent is the engine's business (`buckets.py`). Its buckets have one parameter each.
    """

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world = model, world
        broadcast_module(model)
        self.reducer = Reducer(model)  # the loop's losses make the sum the gradient
        return model


class HookedDataParallel(nn.Module):
    """What `hooks` does as a wrapper of any module. Every rank constructs it, after the process group; in one process
    without a group it sends nothing.

        network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
        F.cross_entropy(network(x), y).backward()   # each gradient is the mean over the ranks afterwards
        optimizer.step()                            # any optimizer, also one that is written by hand

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size. As under DDP,
    every rank runs the same backward passes; where one has none in a step, all ranks call `synchronize` in each step.
    """

    def __init__(self, module: nn.Module) -> None:
        """Raises `UserError` where the launcher started several ranks, but there is no process group."""
        super().__init__()
        self.module = module
        if group_size() > 1:
            broadcast_module(module)
        self.reducer = Reducer(module, mean=True)
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


class DataParallel(GradientSync):
    """torch's DataParallel: one process, whose threads run a replica a GPU and gather at the first.

    It has no ranks, so it refuses a world above one. Where there is no GPU, or one, it passes everything through.
    """

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
