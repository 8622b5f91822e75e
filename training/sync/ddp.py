"""torch's DistributedDataParallel: the baseline, and the default."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.clock import Mark, StepClock, mark
from training.sync.base import GradientSync, nbytes, on_grad
from training.world import World

_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_NEW = "forward_sync_buffers" in _KNOWN  # torch 2.15 renamed it
_LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


@dataclass(kw_only=True, slots=True)
class DdpOptions:
    find_unused: bool = False
    """Look through the graph of every forward pass for parameters that it leaves out (torch's `find_unused_parameters`)."""


class Ddp(GradientSync):
    Options = DdpOptions

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:
        self.model, self.loss_scale = model, float(world.size)
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._step_bytes = sum(map(nbytes, self._names)) if world.size > 1 else 0
        self._missing = set(self._names)
        self._ready: Mark | None = None
        self._asked = False
        self._waits: list[tuple[Mark, Mark]] = []
        self._device = world.device
        for parameter in self._names:
            on_grad(parameter, self._on_grad)
            _stride_like_its_gradient(parameter)
        self.network = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **_LOCAL_BUFFERS,  # batch statistics stay local; evaluation averages them
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mb * 1e6 / 2**20,
            find_unused_parameters=self.options.find_unused,
        )
        self._warm_up(example)
        return self.network

    def _warm_up(self, example: torch.Tensor) -> None:
        """Runs one backward pass and undoes what it left.

        torch orders its buckets anew after the first backward pass, and with them the order of summation: without this
        a resumed run's first step would sum in another order than the uninterrupted run's.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with torch.random.fork_rng(devices=[example.device] if example.device.type == "cuda" else []):
            (self.network(example).sum() * 0.0).backward()
        self._check_all_used()
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers):
                buffer.copy_(before)
        self.zero_grad()

    def _on_grad(self, parameter: torch.Tensor) -> None:
        """Notes when the rank's own part is done, for DDP waits for the other ranks within the backward pass."""
        self._missing.discard(parameter)
        if self.options.find_unused:  # no telling which gradient is the last one
            if not self._asked:  # before DDP has, so that it comes before DDP's own callback, which waits
                self._asked = True
                torch.autograd.Variable._execution_engine.queue_callback(self._on_last)
        elif not self._missing:
            self._ready = mark(self._device)

    def _on_last(self) -> None:
        self._asked, self._ready = False, mark(self._device)

    def zero_grad(self) -> None:
        self._missing, self._asked = set(self._names), False
        self._waits = []
        super().zero_grad()

    @contextlib.contextmanager
    def accumulate(self) -> Any:
        with self.network.no_sync():
            yield
        self._missing = set(self._names)

    def finish(self, clock: StepClock) -> None:
        self._check_all_used()
        for since, until in self._waits:
            clock.waited(since, until)
        clock.grad_ready(self._ready)
        self._missing = set(self._names)  # also for loops that forget the gradients through their optimizer
        clock.synced()
        self._ready, self._waits = None, []
        self.bytes_sent += self._step_bytes

    def _check_all_used(self) -> None:
        """Raises `UserError` where DDP would still wait for gradients: this rank in its next step, the others in this one.

        The others, where they have them all, are told by the end of this rank.
        """
        if not self._missing or self.options.find_unused:
            return
        names = [name for parameter, name in self._names.items() if parameter in self._missing]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise self.refuse(
            f"needs a gradient of every parameter in each step, and {shown} got none",
            "set sync.options={find_unused: true}, or use sync.name=flat, where such a gradient counts as zero",
        )


def _stride_like_its_gradient(parameter: nn.Parameter) -> None:
    """A filter of one input channel lies in memory in one way that may be told in two; a convolution's backward pass tells
    it as channels_last. Told alike, DDP neither copies the gradient nor warns."""
    if parameter.ndim == 4 and parameter.shape[1] == 1 and parameter.is_contiguous():
        strides = torch.empty(parameter.shape, device="meta", memory_format=torch.channels_last).stride()
        parameter.data = parameter.data.as_strided(parameter.shape, strides)
