"""An optimizer step of a loop of one's own: unequal parts are weighted, and a gradient that is not finite moves no weight.

The gradient is that of the mean over the samples of all ranks. A rank backpropagates its mean loss times its number of
samples, divided by that of the global batch; where that is not known yet, the sum over the ranks is divided by it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lockstep.training.data.batches import Part
from lockstep.training.models.stand_in import without_batch_statistics
from lockstep.training.optim.loss_scaler import LOWEST
from lockstep.training.parallel.exchange import all_gather_trees, raise_together
from lockstep.training.run.attempt import Attempt
from lockstep.training.run.own import OwnRun, Replica
from lockstep.training.sync.base import NotSummed
from lockstep.training.sync.buckets import SentAlready

T = TypeVar("T")
STEPS = "call run.step(loss) in place of loss.backward() and optimizer.step(), or run.backward(loss) and run.update()"


class Step:
    """The steps of one attempt, one after another. All ranks call the same methods in the same order."""

    def __init__(self, own: OwnRun, attempt: Attempt, replica: Replica) -> None:
        self.own, self.attempt, self.replica = own, attempt, replica
        self.looks = own.config.nonfinite != "ignore"
        """Whether each gradient is looked at before it moves a weight."""
        self.pending = False
        """Whether gradients have come that no update has used: no checkpoint could hold them."""
        self._part: Part | None = None
        self.same_samples: int | None = None
        """Samples of a batch that all ranks were given alike, which is right only where each takes its part of them; 0: the ranks
        were given different ones, or that cannot be seen. None: not looked yet."""
        self._given = 0
        """Batches of this attempt."""
        self._begun = True
        """Whether the batch under way has had a backward pass."""
        self._counted_early = False
        """Whether an update has counted the batch under way before it had one."""
        self._micro_batches = False
        """Backward passes run inside `accumulate`, before the last micro-batch: they send nothing."""
        self._unsent = False
        """Whether the last backward pass was one of these."""
        self._counted = True
        """Whether the cursor is beyond the batch under way."""
        self._seen: dict[int, tuple[int, int]] = {}
        """Samples of this rank and of all that each optimizer has stepped on since the batch was given."""
        self._stand_in: contextlib.ExitStack | None = None
        """Open while the batch is not this rank's."""
        self._buffers: list[torch.Tensor] = []
        self._not_summed: NotSummed | None = None
        self._forget()

    def _forget(self) -> None:
        self._samples, self._accumulating = 0, False
        self._losses: list[torch.Tensor] = []
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.own.world.device)

    def begin_batch(self, part: Part | None) -> None:
        """A batch is there. The batch statistics are kept, should its gradient not be finite.

        Raises:
            RuntimeError: the gradient of the batch before was not used, and a global batch is one step.
        """
        if self.pending and part is not None:
            raise RuntimeError(
                "a batch of run.batches() had a backward() and no update(): a global batch is one step. To accumulate, make "
                "global_batch_size larger, and cut the batch into micro-batches with run.accumulate()"
            )
        if self.looks and not self.pending:
            self._buffers = [buffer.clone() for buffer in self.replica.model.buffers()]
        self._given += 1
        self._seen.clear()
        self._begun = self._counted = self._counted_early = False
        self.set_part(part)

    def set_part(self, part: Part | None) -> None:
        """How much of the global batch is this rank's, where that is known."""
        self._part = part
        if not self._given:  # a loop without batches of ours: each part is a batch
            self._seen.clear()
        if part is not None and part.samples == 0 and not self._stand_in:
            self._stand_in = contextlib.ExitStack()
            self._stand_in.enter_context(without_batch_statistics(self.replica.model))

    def end_batch(self) -> None:
        """The script is done with it. No checkpoint is taken while its gradient is still to be used."""
        self._count()
        self._part = None
        self._end_stand_in()

    def _count(self) -> None:
        """Moves the cursor: at the batch's update, so that a script that leaves there goes on after it."""
        if not self._counted:
            self._counted = True
            self.own.state.cursor.step += 1

    def check_used(self, what: str) -> None:
        """At the end of an epoch, or of the run. Raises `RuntimeError` where gradients are left, since no checkpoint could hold
        them, and where no step was ever made.

        Args:
            what: the epoch, or the run: it is named in the error.
        """
        if (self._given > 1 or self.own.state.cursor.epoch or what == "epoch") and not self.own.kept.steps:
            raise RuntimeError(
                f"the {what} ends and no step was made: {STEPS}. What makes no step belongs before run.epochs()"
            )
        if self.pending:
            raise RuntimeError(
                f"the {what} ends with gradients that no update() has used, so it is not saved here: call run.update() after "
                "the last batch, too. With run.iterate(loader, accumulate=k) the last step has fewer batches where k does "
                "not divide their number"
            )

    def _end_stand_in(self) -> None:
        if self._stand_in is not None:
            self._stand_in.close()
            self._stand_in = None

    def accumulate(self, parts: Iterable[T]) -> Iterator[T]:
        every = list(parts)
        for number, micro in enumerate(every):
            self._accumulating = True
            last = number == len(every) - 1
            with contextlib.nullcontext() if last else self._sending_nothing():
                yield micro

    @contextlib.contextmanager
    def _sending_nothing(self) -> Iterator[None]:
        self._micro_batches = True
        try:
            with self.replica.sync.accumulate():
                yield
        finally:
            self._micro_batches = False

    def backward(self, loss: torch.Tensor, samples: int | None, scaler: Any) -> None:
        """Raises `TypeError`, `ValueError` for arguments that cannot be meant; `UserError` where the strategy has sent the
        gradient of this step; `RuntimeError` for a call out of its order."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise TypeError(f"the loss is the mean over this rank's samples, one number; got {what}")
        part = self._part
        if samples is None:
            if part is None or self._accumulating:
                raise TypeError(
                    "say how many samples the loss is the mean of, step(loss, samples=…): it is known only of whole "
                    "batches of run.batches() and run.part()"
                )
            samples = part.samples
        elif samples < 0:
            raise ValueError(f"samples is the number of this rank's samples, got {samples}")
        if part is not None and part.samples == 0:
            samples = 0
        if part is None and getattr(self.replica.sync.options, "step", None) == "overlapped":
            raise self.replica.sync.refuse(
                "with sync.options.step=overlapped must know the size of the global batch before the backward pass",
                "take the samples from run.batches() or run.part()",
            )
        if not self._begun and self._counted_early:
            raise RuntimeError(
                "update() was called for earlier batches before this batch's backward(): between two batches a gradient "
                "would always be under way, and the run could never be saved there. Call update() after the backward() of "
                "the last batch of a step"
            )
        self._begun, self._unsent = True, self._micro_batches
        if part is None and self.same_samples and samples >= self.same_samples:  # fewer: it has taken its share
            self.same_samples = 0
            if self.own.world.leader:
                self.own.console.warn(
                    "all ranks were given the same batch, and each has used all of it, so a step learns no more than one rank "
                    "would: give each its own samples, with torch's DistributedSampler or run.batches(), or let it take its "
                    "part with run.part()"
                )
        factor = samples * self.replica.sync.loss_factor / (part.total if part is not None else 1)
        self.pending = True
        scaled = loss * factor
        try:
            (scaled if scaler is None else scaler.scale(scaled)).backward()
        except SentAlready as error:
            raise self.replica.sync.refuse(
                "has sent the gradient of this step's first backward()",
                "to add up several batches, go over run.iterate(loader, accumulate=k) and run.accumulate(batches)",
            ) from error
        with torch.no_grad():
            self._losses.append(loss.detach())
            self._samples += samples
            if samples:
                self._loss_sum += loss.detach().double() * samples

    def update(self, optimizers: tuple[torch.optim.Optimizer, ...], clip: float, scaler: Any) -> None:
        """With these optimizers, or all. Raises `Ended` where the gradient is not finite and the run is to end; `RuntimeError`
        without a `backward`."""
        optimizers = optimizers or tuple(self.replica.optimizers.values())
        own, sync, part = self.own, self.replica.sync, self._part
        if not self.pending:
            raise RuntimeError("update() was called without backward(): there is no gradient")
        if self._unsent:
            raise RuntimeError(
                "update() was called before the last micro-batch of accumulate(), whose backward() sends the gradient: go "
                "over all micro-batches, and call backward() for each"
            )
        self._counted_early = not self._begun
        if part is not None and self._samples != part.samples:
            raise RuntimeError(
                f"the losses were said to be of {self._samples} samples, but this rank's part of the batch has {part.samples}. "
                "Micro-batches are cut from the part; batches of several parts need samples of their own, without run.part()"
            )
        with own.state.clock.synchronizing(sync.watch):
            try:
                sync.synchronize()
            except NotSummed as error:
                if not (error.reaches_all and self.looks):
                    raise
                self._not_summed = error  # a rank that had another forward pass hears of it where it looks at the NaN
        total = self._scale_by_total() if part is None else part.total
        overflow = False if scaler is None else _unscaled(scaler, optimizers, own.world.device)
        of = self._stepping(optimizers)
        norm = sync.grad_norm(of) if self.looks and not overflow else None
        # NaN and infinity survive the sum, so every rank reads the same and needs no further collective.
        scale_is_kept = False
        if overflow or (norm is not None and not bool(torch.isfinite(norm))):
            sync.abandon()
            self._restore_buffers()
            scale_is_kept = not self._scale_too_high(scaler if overflow else None)
        else:
            if clip:
                norm = sync.clip(clip, norm, of)
            if of is not None:
                sync.forget_nonfinite()
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            self.attempt.step_was_finite()
            own.state.losses[0] += self._loss_sum
            own.state.losses[1] += self._samples
        if scaler is not None:
            before = scaler.get_scale() if scale_is_kept or sync.remembers else None  # waits for the device
            scaler.update(before if scale_is_kept else None)
            if sync.remembers and (after := scaler.get_scale()) != before:
                sync.gradients_rescaled(after / before)
        sync.zero_grad()
        self._end_stand_in()
        own.kept.steps, own.went_on = own.kept.steps + 1, True
        samples, new = self._new_samples(optimizers, total)
        own.kept.samples += new
        if self.replica.ema is not None:
            self.replica.ema.update(own.kept.steps)
        self.pending = False
        self._forget()
        self._count()
        lr = float(next(iter(self.replica.optimizers.values())).param_groups[0]["lr"])
        self.attempt.step_done(lr, samples, norm)

    def _new_samples(self, optimizers: tuple[torch.optim.Optimizer, ...], total: int) -> tuple[int, int]:
        """Samples of this rank and of all that this update adds: those of a batch count once, however many networks learn of it."""
        before = tuple(map(max, zip((0, 0), *self._seen.values(), strict=True)))
        for optimizer in optimizers:
            own, everywhere = self._seen.get(id(optimizer), (0, 0))
            if self._part is None:
                self._seen[id(optimizer)] = own + self._samples, everywhere + total
            else:  # each update is of the whole part
                self._seen[id(optimizer)] = self._samples, total
        own, everywhere = map(max, zip((0, 0), *self._seen.values(), strict=True))
        return own - before[0], everywhere - before[1]

    def _stepping(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> set[torch.Tensor] | None:
        """The parameters of these optimizers, whose gradients make the step; None: every one that is trained.

        The others' gradients belong to no step: those of a second network, say, which this one's loss has gone through.
        """
        groups = itertools.chain.from_iterable(map(self.replica.sync.parameter_groups, optimizers))
        of = set(itertools.chain.from_iterable(groups))
        return None if all(p in of for p in self.replica.model.parameters() if p.requires_grad) else of

    def _scale_by_total(self) -> int:
        """Divides the sum of the gradients by the number of samples of all ranks, and returns that. Collective."""
        total = torch.tensor(self._samples, dtype=torch.int64)
        dist.all_reduce(total)
        if not int(total):
            raise RuntimeError("a step without samples: every rank gave samples=0")
        self.replica.sync.scale_gradients(torch.tensor(1.0 / int(total), device=self.own.world.device))
        return int(total)

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        if self._buffers:
            for buffer, before in zip(self.replica.model.buffers(), self._buffers, strict=True):
                buffer.copy_(before)

    def _scale_too_high(self, scaler: Any) -> bool:
        """Why the step moves no weight: the scale of the loss, which is lowered then, or a step that is not finite by itself.

        Collective. Raises `Ended` where the run is not to go on; `UserError` where a gradient was not summed.

        Args:
            scaler: whose scaled gradient overflowed; None: the gradient had no scale.
        """
        raise_together(self._not_summed, self.own.world)
        own = all(bool(torch.isfinite(loss).all()) for loss in self._losses)
        bad = [rank for rank, finite in enumerate(all_gather_trees(own, self.own.world)) if not finite]
        if scaler is not None and not bad and scaler.get_scale() > LOWEST:
            return True
        said = "; ".join(f"rank {rank}: loss is not finite" for rank in bad)
        reason = f"step {self.own.steps_done + 1}: {said or 'a gradient is not finite, though every loss is'}"
        if self.looks:
            self.attempt.skip_step(reason)
        return False


def _unscaled(scaler: Any, optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device) -> bool:
    """Takes a `torch.amp.GradScaler`'s factor out of the gradients; whether any rank has found an infinity. Collective.

    A strategy may give each rank its own part of the gradients, so what a rank has found is made known to the scalers of all.
    """
    if not scaler.is_enabled():
        return False
    found = torch.zeros((), device=device)
    states = []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        state = state or scaler._per_optimizer_states[id(optimizer)].setdefault("found_inf_per_device", {})
        states.append(state)
        for value in state.values():
            found += value.to(device).sum()
    everywhere = found.clone()
    dist.all_reduce(everywhere)
    for state in states:
        for value in state.values():
            value.fill_(float(everywhere > 0))
        if not state:  # no gradient of this rank's: the scaler asks for an answer all the same
            state[device] = (everywhere > 0).float()
    return bool(everywhere > 0)
