"""torch's DistributedDataParallel: the baseline, and the default."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.clock import Mark, StepClock, mark
from training.sync.base import GradientSync
from training.world import World

_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_NEW = "forward_sync_buffers" in _KNOWN  # torch 2.15 renamed it
_LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


class Ddp(GradientSync):
    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:
        self.model, self.loss_scale = model, float(world.size)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._step_bytes = sum(p.numel() * p.element_size() for p in trained) if world.size > 1 else 0
        self._missing = self._count = len(trained)
        self._ready: Mark | None = None
        self._device = world.device
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._on_grad)
        self.network = DistributedDataParallel(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **_LOCAL_BUFFERS,  # batch statistics stay local; evaluation averages them
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mb * 1e6 / 2**20,
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
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), buffers):
                buffer.copy_(before)
        self.zero_grad()

    def _on_grad(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:  # DDP waits for the other ranks within backward: note when the own part was done
            self._ready = mark(self._device)

    def zero_grad(self) -> None:
        self._missing = self._count
        for parameter in self.model.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Any:
        with self.network.no_sync():
            yield
        self._missing = self._count

    def finish(self, clock: StepClock) -> None:
        clock.grad_ready(self._ready if self._missing == 0 else None)
        clock.synced()
        self.bytes_sent += self._step_bytes
