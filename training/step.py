"""One optimizer step, and the arithmetic it runs in."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from training.config import Config
from training.contract import UserError
from training.data.augment import Keys, augment, draw_keys
from training.data.loader import Batch
from training.data.order import bounds
from training.optim import set_rates
from training.state import TrainState


def real_type(precision: str) -> torch.dtype:
    """The type of weights, images and losses; the half formats are autocast's business."""
    return torch.float64 if precision == "float64" else torch.float32


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if precision in ("bfloat16", "float16"):
        return torch.autocast(device.type, getattr(torch, precision))
    return contextlib.nullcontext()


def compiled(network: nn.Module, device: torch.device) -> nn.Module:
    """`torch.compile` of the network. Raises `UserError` where its compiler is missing."""
    if device.type == "cpu":
        if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            raise UserError("compile=true needs a C++ compiler on the CPU: install g++, or set compile=false")
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            raise UserError("compile=true needs Triton on a GPU: install it, or set compile=false") from None
        if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            raise UserError("compile=true needs a C compiler for Triton: install gcc, or set compile=false")
    return cast(nn.Module, torch.compile(network))


class NonFinite(Exception):
    """A gradient was NaN or infinite on some rank; no weight has been changed."""


class Step:
    """The optimizer step of the loop: augment → forward → backward → sum over the ranks → update.

    Args:
        network: what the sync strategy's `wrap` gave back.
        multiple: micro-batches come in blocks of this many samples.
    """

    def __init__(self, config: Config, state: TrainState, network: nn.Module, multiple: int) -> None:
        self.config, self.state, self.network, self.multiple = config, state, network, multiple
        self.grad_norm: torch.Tensor | None = None
        """Norm of the last step's gradient before clipping, on the device; None where nobody asked for it."""

    @torch.no_grad()
    def restore(self, kept: list[torch.Tensor]) -> None:
        """Puts back what `statistics` gave before."""
        for tensor, before in zip(self.statistics(), kept):
            tensor.copy_(before)

    def __call__(self, batch: Batch, epoch: int, when: float) -> None:
        """Trains one batch. Raises `NonFinite`, on all ranks at once, before any weight is changed.

        Args:
            when: where the learning rate's schedule stands: the epochs (or steps) that are done after this step.
        """
        state, looks = self.state, self.config.nonfinite != "ignore"
        # A forward pass that diverges leaves NaN in the batch statistics and the loss, before anyone can look.
        before = [tensor.clone() for tensor in self.statistics()] if looks else []
        state.sync.zero_grad()
        set_rates(state.optimizer, self.config.optim, when)  # before backward, within which a strategy may step
        self.backward(batch, draw_keys(self.config.seed, epoch))
        state.sync.finish(state.clock)
        # NaN and infinity survive the sum, so every rank reads the same and needs no further collective.
        if looks:
            norm = self.grad_norm = state.sync.grad_norm()
            if not bool(torch.isfinite(norm)):
                state.sync.abandon()
                self.restore(before)
                raise NonFinite
        self.update()

    def update(self) -> None:
        """Clips the gradients and moves the weights."""
        if self.config.optim.clip:
            self.grad_norm = self.state.sync.clip(self.config.optim.clip)
        self.state.optimizer.step()

    def statistics(self) -> list[torch.Tensor]:
        """What a forward pass changes: the batch statistics and the sum of the losses."""
        return [*self.state.model.buffers(), self.state.losses]

    def backward(self, batch: Batch, keys: Keys) -> None:
        """Forward and backward over the rank's part, in micro-batches; only the last one sends."""
        accumulate = self.config.accumulate
        pieces = [bounds(len(batch.rows), number, accumulate, self.multiple) for number in range(accumulate)]
        pieces = [(low, high) for low, high in pieces if high > low]
        for number, (low, high) in enumerate(pieces):
            last = number == len(pieces) - 1
            with contextlib.nullcontext() if last else self.state.sync.accumulate():
                self._micro_batch(batch, low, high, keys)

    def _micro_batch(self, batch: Batch, low: int, high: int, keys: Keys) -> None:
        config, state = self.config, self.state
        rows, ids, labels = (tensor[low:high] for tensor in (batch.rows, batch.ids, batch.labels))
        x = augment(batch.images, rows, ids, config.data, keys, real_type(config.precision), config.channels_last)
        if batch.weight == 0:
            state.model.eval()  # the stand-in of an empty part must leave no trace in the batch statistics
        with autocast(config.precision, state.world.device):
            logits = self.network(x)
        losses = F.cross_entropy(
            logits.to(real_type(config.precision)), labels, label_smoothing=config.loss.smoothing, reduction="sum"
        )
        divisor = batch.total if config.loss.reduction == "mean" else 1
        (losses * (batch.weight * state.sync.loss_scale / divisor)).backward()
        state.model.train()
        with torch.no_grad():
            state.losses[0] += losses * batch.weight
            state.losses[1] += len(labels) * batch.weight
