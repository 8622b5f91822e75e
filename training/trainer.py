"""The Trainer: the epochs of a run, and one optimizer step in the order of the textbook.

    for each epoch, for each global batch:
        augment → forward → loss → backward → sum over the ranks → update → average
    after each epoch: evaluate, save

What surrounds a step (the boundary at which all ranks leave or save together, metrics, checkpoints) is in `lockstep.training.run`.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.training.checkpoint.state import TrainState
from lockstep.training.config import Config
from lockstep.training.data.augment import Keys, augment, draw_keys
from lockstep.training.data.loader import Batch
from lockstep.training.data.order import bounds
from lockstep.training.models.arithmetic import autocast, real_type
from lockstep.training.models.stand_in import without_batch_statistics
from lockstep.training.optim import learning_rate, set_rates
from lockstep.training.optim.loss_scaler import LOWEST
from lockstep.training.resilience.divergence import diagnose
from lockstep.training.run.recipe_attempt import RecipeAttempt


class NonFinite(Exception):
    """A gradient was NaN or infinite on some rank; no weight has been changed."""


class Trainer:
    """Trains `state` from its cursor on. The ranks of a run call the same methods in the same order.

    Args:
        network: what the sync strategy's `wrap` gave back.
        batch_multiple: micro-batches hold a multiple of this many samples.
        steps_per_epoch: global batches in an epoch.
    """

    def __init__(
        self, config: Config, state: TrainState, network: nn.Module, *, batch_multiple: int = 1, steps_per_epoch: int
    ) -> None:  # fmt: skip
        self.config, self.state, self.network = config, state, network
        self.batch_multiple, self.steps_per_epoch = batch_multiple, steps_per_epoch
        self.checks_gradient = config.nonfinite != "ignore" or state.scaler is not None
        """Whether each gradient is looked at before it moves a weight."""
        self.grad_norm: torch.Tensor | None = None
        """Norm of the last step's gradient before clipping, on the device; None if it was not computed."""

    def train(self, attempt: RecipeAttempt) -> None:
        """Trains to the end of the last epoch. Raises `Ended` where the run ends before that.

        The cursor is moved by what counts: `batch_done` by a step, `epoch_done` to the next epoch.
        """
        cursor = self.state.cursor
        while cursor.epoch < self.config.epochs:
            for batch in attempt.batches():  # between two steps all ranks leave, or save, where they agreed to
                try:
                    self.step(batch)
                    attempt.step_was_finite()
                except NonFinite:
                    attempt.skip_step(self.diagnose(batch))
                self.update_average()
                attempt.batch_done(batch, learning_rate(self.config.optim, self.schedule_position), self.grad_norm)
            attempt.epoch_done()

    def step(self, batch: Batch) -> None:
        """One optimizer step over this rank's part of a global batch.

        Raises:
            NonFinite: on all ranks at once, before any weight is changed.
        """
        # Rates first: under sync.options.step=overlapped the optimizer steps during backward.
        set_rates(self.state.optimizer, self.config.optim, self.schedule_position)
        while not self.compute_gradients(batch):  # forward, backward, sum over the ranks
            self.lower_scale_or_raise()
        self.update()
        if self.state.scaler is not None and self.state.scaler.grow_if_due():
            self.state.sync.gradients_rescaled(2.0)

    @property
    def step_number(self) -> int:
        """Number of the step under way in the run, from 1."""
        return self.state.cursor.epoch * self.steps_per_epoch + self.state.cursor.step + 1

    @property
    def schedule_position(self) -> float:
        """Where the learning rate's schedule stands after the step under way, in its own unit: epochs or steps."""
        return (
            self.step_number / self.steps_per_epoch if self.config.optim.schedule_unit == "epoch" else self.step_number
        )

    def compute_gradients(self, batch: Batch) -> bool:
        """Forward, backward and the sum over the ranks. False if the sum is not finite; then nothing has changed."""
        sync = self.state.sync
        # A forward pass that diverges leaves NaN in the batch statistics and the loss, before anyone can look.
        before = [tensor.clone() for tensor in self.statistics()] if self.checks_gradient else []
        sync.zero_grad()
        self.forward_backward(batch, draw_keys(self.config.seed, self.state.cursor.epoch))
        with self.state.clock.synchronizing(sync.watch):
            sync.synchronize()
        if not self.checks_gradient:
            return True
        # NaN and infinity survive the sum, so every rank reads the same and needs no further collective.
        norm = self.unscale_and_measure()
        if bool(torch.isfinite(norm)) or self.accepts_nonfinite():
            return True
        sync.abandon()
        self.restore(before)
        return False

    def forward_backward(self, batch: Batch, keys: Keys) -> None:
        """Augment → forward → loss → backward over the rank's part, in micro-batches; the last one sends the gradients."""
        config, state, count = self.config, self.state, self.config.accumulate
        parts = [bounds(len(batch.rows), number, count, self.batch_multiple) for number in range(count)]
        parts = [(low, high) for low, high in parts if high > low]
        dtype, mean = real_type(config.precision), config.loss.reduction == "mean"
        factor = batch.weight * state.sync.loss_factor / (batch.total if mean else 1)
        for low, high in parts:
            last = high == parts[-1][1]
            rows, ids, labels = (tensor[low:high] for tensor in (batch.rows, batch.ids, batch.labels))
            x = augment(batch.images, rows, ids, config.data, keys, dtype, config.channels_last)
            sends = contextlib.nullcontext() if last else state.sync.accumulate()
            mode = without_batch_statistics(state.model) if batch.weight == 0 else contextlib.nullcontext()
            with sends, mode:
                with autocast(config.precision, state.world.device):
                    logits = self.network(x)
                losses = F.cross_entropy(
                    logits.to(dtype), labels, label_smoothing=config.loss.smoothing, reduction="sum"
                )
                loss = losses * factor
                # The strategy's hooks send the gradients from in here (sync/watch.py, sync/buckets.py; DDP's are torch's).
                (loss if state.scaler is None else loss * state.scaler.factor).backward()
            with torch.no_grad():
                state.losses[0] += losses * batch.weight
                state.losses[1] += len(labels) * batch.weight

    def lower_scale_or_raise(self) -> None:
        """Halves the loss scale, for the step to be taken again. Raises `NonFinite` where float16 is not the cause."""
        scaler, sync = self.state.scaler, self.state.sync
        if scaler is None:
            raise NonFinite
        if not scaler.halve():
            sync.gradients_rescaled(scaler.undo())
            raise NonFinite
        sync.gradients_rescaled(0.5)

    def unscale_and_measure(self) -> torch.Tensor:
        """Takes the loss scale out of the gradients, and returns their norm."""
        norm, scaler = self.state.sync.grad_norm(), self.state.scaler
        if scaler is not None:
            norm = norm * scaler.inverse
            self.state.sync.scale_gradients(scaler.inverse)
        self.grad_norm = norm
        return norm

    def accepts_nonfinite(self) -> bool:
        """Whether a gradient that is not finite is used all the same."""
        scaler = self.state.scaler
        return self.config.nonfinite == "ignore" and (scaler is None or scaler.value <= LOWEST)

    def update(self) -> None:
        """Clips the gradients and moves the weights."""
        if self.config.optim.clip:
            measured = self.grad_norm if self.checks_gradient else None  # else it is that of an earlier step
            self.grad_norm = self.state.sync.clip(self.config.optim.clip, measured)
        self.state.optimizer.step()

    def update_average(self) -> None:
        """The average of the weights follows them."""
        if self.state.ema:
            self.state.ema.update(self.step_number)

    def diagnose(self, batch: Batch) -> str:
        """Which rank's loss or gradient is not finite, in a sentence. Collective."""
        epoch, network = self.state.cursor.epoch, self.network

        def again(model: nn.Module) -> None:
            self.network = model
            try:
                self.forward_backward(batch, draw_keys(self.config.seed, epoch))
            finally:
                self.network = network

        kept = [tensor.clone() for tensor in self.statistics()]
        try:
            return f"step {self.step_number}: {diagnose(self.state, again)}"
        finally:
            self.restore(kept)

    def statistics(self) -> list[torch.Tensor]:
        """What a forward pass changes: the batch statistics and the sum of the losses."""
        return [*self.state.model.buffers(), self.state.losses]

    @torch.no_grad()
    def restore(self, kept: list[torch.Tensor]) -> None:
        """Puts back what `statistics` gave before."""
        for tensor, before in zip(self.statistics(), kept):
            tensor.copy_(before)
