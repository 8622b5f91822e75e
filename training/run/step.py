"""One optimizer step of any loop: forward and backward over this rank's part, the sum over the ranks, the look for NaN, the update.

The gradient is that of the mean over the samples of all ranks. A rank backpropagates its mean loss times its number of
samples, divided by that of the global batch. If the latter is not known yet, the sum over the ranks is divided by it.

A step that is given as a function (`take`) can be computed again. So it runs in micro-batches, at half the scale after float16
overflowed, recorded (`recording.py`), and to name a non-finite gradient's rank and parameter. Before that the batch
statistics are put back, and torch draws the same numbers: its generators are seeded by (seed, step, rank) around the function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import generators
from ..data import order
from ..data.batches import Part
from ..models.arithmetic import evaluating
from ..parallel.exchange import all_gather_trees
from ..resilience import divergence
from .attempt import Attempt
from .batch_mean import BatchMean
from .bytecode import code_of
from .logical_workers import LogicalWorkers, check_machine
from .replica import Replica, Several, kept_buffers, put_back
from .run import Run
from .step_input import (
    Compute,
    CurrentBatch,
    Numbers,
    StepInput,
    StepSums,
    checked_loss,
    count_scaled_step,
    set_scale,
)

T = TypeVar("T")
STEPS = "call run.step(loss) in place of loss.backward() and optimizer.step(), or run.backward(loss) and run.update()"
LOWEST_SCALE = 2.0**-8
"""Of a loss in float16. A gradient that overflows at this scale is not finite by itself."""


class Step:
    """The steps of one attempt, one after another. All ranks call the same methods in the same order. The constructor sets the fields
    whose text names no other writer."""

    def __init__(self, run: Run, attempt: Attempt, replica: Replica) -> None:
        self.run, self.attempt, self.replica = run, attempt, replica
        self.looks = run.config.nonfinite != "ignore"
        """Whether each gradient is checked for NaN and infinity before it moves a weight."""
        cut = replica.sync.batch_parts is not None
        self._drawing = generators.RngScope(run.world.device, every=cut)
        self._cuts = run.world.size > 1 or cut or run.config.micro_batch_size > 0
        """Whether a backward pass may have the gradient of a part of the global batch only."""
        self.sums = StepSums(run, attempt)
        self.logical_workers = LogicalWorkers(run, replica, self._drawing, self.sums) if cut else None
        self.current = CurrentBatch(run.world, replica.sync.batch_parts)
        self._batch_mean = BatchMean(run, replica, self.current)
        self.recorder: Any = None
        """The recorder of CUDA graphs (`recording.Recorder`). `Loop.begin` sets it; None: all steps run eagerly."""
        self._replay: Any = None
        """The recording that replays the step under way; None: the step runs eagerly. `take` sets it."""
        self.pending = False
        """Whether the batch has gradients that no update has used: `backward` sets it, `_end` clears it."""
        self.part: Part | None = None
        """This rank's part of the batch; None: unknown. `set_part` sets it, `end_batch` clears it, `_loss` narrows it to a micro-batch."""
        self.same_samples = 0
        """Samples of a first batch that is the same on all ranks, an error unless each rank takes its part. 0: the batches differ, or
        nothing has compared them. `Loop` sets it."""
        self._given = 0
        """Batches of this attempt: `begin_batch` counts."""
        self._steps_before = 0
        """Steps of the run before the batch under way."""
        self._micro_batches = False
        """Whether `backward` sends nothing: `accumulate` sets it around each micro-batch but the last."""
        self._total: int | None = None
        """Samples of all ranks: `_divide` sets it once the gradients are summed; `backward`, of a new step, clears it."""
        self._versions: list[int] = []
        """Versions of the gradients after `backward`: of a micro-batch, or if a rank has some of the sums only. A changed one has a higher
        version in the next `backward`, or in `update`."""
        self._counted = True
        """Whether the cursor is beyond the batch under way: `begin_batch` clears it, `_count` sets it."""
        self._stand_in = contextlib.ExitStack()
        """A context of evaluation mode, open while this rank's part has no sample. `set_part` opens it, `end_batch` or `_end` closes it."""
        self._before: list[torch.Tensor] = []
        """Copies of the buffers before the step, to undo it. `begin_batch` makes them, and `take` for a step that is a function."""
        self._as_function = False
        """Whether the last step was a function, so that `take` makes `_before`: `take` sets it, `backward` clears it."""
        self._losses: list[torch.Tensor] = []
        """The losses of this rank's backward passes in the step, detached. `_backpropagate` adds them, `_forget` clears them."""
        self._samples, self._accumulating = 0, 0
        """This rank's samples of the step so far (`_backpropagate` adds, `_forget` clears); how many parts `accumulate` cuts the batch
        into, 0: it does not."""
        self._inputs = StepInput()
        """The input of the step that `backward` has begun, for `update`."""
        if not replica.sync.is_replicated:  # no rank gets through its forward pass without the others
            replica.network.register_forward_pre_hook(self._begin_pass)

    def _begin_pass(self, *_: Any) -> None:
        self.attempt.stage = max(self.attempt.stage, 1)

    def _forget(self) -> None:
        """Clears the samples, losses and sums of the step under way."""
        self._samples, self._losses = 0, []
        self.sums.begin()

    # The batch under way.

    def begin_batch(self, part: Part | None) -> None:
        """Begins the step of a new batch, with this rank's part of it, if known."""
        if self.looks and not self._as_function:
            self._before = kept_buffers(self.replica.model)
        self._given += 1
        self._steps_before = self.run.user_state.steps
        self.attempt.buffers.begin()
        self._counted, self.attempt.stage = False, 0
        if self.logical_workers is not None:
            self.logical_workers.begin_batch()
        self.set_part(part)

    def set_part(self, part: Part | None) -> None:
        """Sets this rank's part of the global batch, if known. A rank without a sample runs the network on a stand-in batch."""
        self.part = part
        if part is not None and part.samples == 0 and not part.num_parts:
            # The rank still runs the network, to join the collectives of backward: a stand-in batch times zero, which must move no
            # running statistics.
            self._stand_in.enter_context(evaluating(self.replica.model))

    def end_batch(self) -> None:
        """Ends the batch under way. Raises `RuntimeError` if no update has used its gradient."""
        self._check_pending("batch")
        self._count()
        self.part = None
        self._stand_in.close()

    def _count(self) -> None:
        """Moves the cursor beyond the batch, once: at its update, so that a script that leaves there resumes after it."""
        if not self._counted:
            self._counted = True
            self.run.state.cursor.step += 1

    @property
    def made(self) -> int:
        """Steps of the batch under way."""
        return self.run.user_state.steps - self._steps_before

    def _meet(self) -> None:
        """Lets the ranks part with a sentence if they take other numbers of steps of a batch. Collective, perhaps."""
        if self._given:
            self.attempt.desync.begin_step(self.made)

    def check_used(self, what: str) -> None:
        """Checks, at the end of an epoch or of the run, that a step was made and each gradient was used. Raises `RuntimeError`.

        Args:
            what: "epoch" or "run", for the error.
        """
        if (self._given > 1 or self.run.state.cursor.epoch or what == "epoch") and not self.run.user_state.steps:
            raise RuntimeError(
                f"the {what} ends and no step was made: {STEPS}. What makes no step belongs before run.epochs()"
            )
        self._check_pending(what)

    def _check_pending(self, what: str) -> None:
        """Raises `RuntimeError` if `what` ends, or begins, with a gradient that no update has used: no checkpoint could hold it."""
        if self.pending:
            raise RuntimeError(
                f"the {what} ends with gradients that no update() has used: call run.update() once for each batch, after its last "
                "backward(). To accumulate, go over run.iterate(loader, accumulate=k) and run.accumulate(batches)"
            )

    # A step that is given as a function.

    def take(self, compute: Compute, inputs: StepInput) -> None:
        """Takes one step, whose loss is `compute(*inputs.batch)`. Raises as `backward` and `update` do. Collective."""
        self._check_pending("step before")
        self._meet()
        inputs = dataclasses.replace(inputs, compute=compute).of_part(self.part)
        inputs = inputs.in_micro_batches(self.run.config.micro_batch_size, self.replica.sync)
        self._check_use(inputs.part, inputs.samples)
        inputs = self._moving(inputs)
        code = code_of(compute)
        self.attempt.unsaved.code, self.attempt.unsaved.samples = code, inputs.samples
        if self.logical_workers is not None:
            check_machine(self.run, self.attempt.known)
        if not self._given:  # else it has begun with the batch: what the script does before the step is a part of it
            self.attempt.buffers.begin()
        with self.replica.training(inputs.optimizers), self._drawing:
            self._redraw()
            if self.recorder is not None:
                self._replay = self.recorder.prepare(inputs)
            if self._replay is not None:
                self._before = self._replay.before
            else:
                keeps = self.looks or inputs.scaler is not None or self.logical_workers is not None
                self._before = kept_buffers(self.replica.model) if keeps else []
            self._batch_mean.look(inputs, self._loss, code)
            self._as_function, self.attempt.stage = True, 2
            norm = self._tried(inputs)
            self.replica.sync.zero_grad()
            self._batch_mean.look_again(inputs, self._loss)
        if self.logical_workers is not None:
            self.logical_workers.end()
        self._end(self._total if inputs.total is None else inputs.total, norm)

    def _tried(self, inputs: StepInput) -> torch.Tensor | None:
        """Moves the weights, unless the gradient is not finite. Computes it again while the loss scale is too high. Returns its norm."""
        scale: float | None = None
        while True:
            norm = self.gradients(inputs)
            if self._is_usable(norm, inputs):
                return self._use(inputs, norm)
            if scale is None and inputs.scaler is not None:
                scale = inputs.scaler.get_scale()
            if not self._reject(inputs, scale):
                return norm
            self._redraw()

    def gradients(self, inputs: StepInput) -> torch.Tensor | None:
        """Computes the gradient and sums it over the ranks. Returns its norm without the loss scale, a scalar on the device; None if
        nothing reads it. Collective."""
        if self.logical_workers is not None:
            self._sum_parts(inputs, self.logical_workers)
        elif self._replay is None:
            self.forward_backward(inputs)
            with self.run.state.clock.synchronizing(self.replica.sync.watch):
                self.replica.sync.synchronize()
            self.sums.agree()
            self.attempt.known.add("numbers")
            self._divide(inputs)
        if self._replay is not None:
            self._samples, self._losses = inputs.samples, []
            return self._replay.replay_gradients()
        return self.measure(inputs)

    def _sum_parts(self, inputs: StepInput, parts: LogicalWorkers) -> None:
        """Sums the gradients, statistics and losses of all parts of the batch. If a rank is lost, the others compute all parts again."""
        sync, live, tried = self.replica.sync, self.run.world.live, False

        def compute() -> list[torch.Tensor]:
            nonlocal tried
            if tried:
                sync.zero_grad()
                put_back(self.replica.model, self._before)
            tried = True
            self.forward_backward(self.current.now(inputs))
            self.sums.agree(parts.refused)
            with self.run.state.clock.synchronizing(sync.watch):
                return parts.reduce()

        sums = compute() if live is None else live.retryable(compute, changes=True)
        self.attempt.known.add("numbers")
        if self._replay is not None:
            torch._foreach_copy_(self._replay.sums, sums)  # the update's graph reads them there
        else:
            parts.finish(sums)

    def forward_backward(self, inputs: StepInput, sums: bool = True) -> None:
        """Runs the function and its backward pass in micro-batches; the last one sends the gradients. `exact` cuts parts first.

        Args:
            sums: whether the gradients are summed over the ranks.
        """
        self._forget()
        part, parts = inputs.part, self.logical_workers
        if part is None or parts is None:
            self._forward_backward(inputs, 0, inputs.samples)
            return
        if sums:
            parts.begin(part, self._before, not self.attempt.saver.steps_since, looks=self._replay is None)
        live = self.run.world.live if sums else None
        for index, (low, high) in enumerate(part.parts, part.first):
            if live is not None:
                live.check()
            if sums and index == part.first and parts.proof is not None:
                first = inputs.micro_batches(low, high)[0]
                parts.prove(index, functools.partial(self._loss, inputs, *first), inputs, self.current.gave)
            if sums and self._replay is not None and self._replay.replay_part(inputs, index, low, high):
                continue
            parts.begin_part(index, sums)
            self.sums.begin()
            if not (sums and parts.refused):
                self._forward_backward(inputs, low, high)
            if sums:
                parts.take(index, (high - low) / part.total)

    def _forward_backward(self, inputs: StepInput, low: int, high: int) -> None:
        """Runs the forward and backward passes of these samples of this rank."""
        for first, end in inputs.micro_batches(low, high):
            with contextlib.nullcontext() if end == high else self.replica.sync.accumulate():
                loss, numbers = self._loss(inputs, first, end)
                self._backpropagate(inputs, loss, numbers, end - first)

    def _loss(self, inputs: StepInput, first: int, end: int) -> tuple[torch.Tensor, Numbers]:
        """Returns the function's loss and numbers for these samples of the rank. `self.part` has their number meanwhile."""
        before, part, cut = self.part, inputs.part, self.logical_workers is not None
        if part is not None and part.samples:
            self.part = dataclasses.replace(part, samples=end - first)
        try:
            with self.logical_workers.calling() if self.logical_workers is not None else contextlib.nullcontext():
                return inputs.result(first, end, copies=cut)
        except Exception:  # the script may catch it, and call the step again
            self.attempt.stage = 0
            self.replica.sync.zero_grad()
            put_back(self.replica.model, self._before)
            raise
        finally:
            self.part = before

    def _backpropagate(self, inputs: StepInput, loss: torch.Tensor, numbers: Numbers, samples: int) -> None:
        """Adds the gradient of these samples to that of the step, and their loss and numbers to its sums."""
        weighed = samples * inputs.weight
        share, divisor = (inputs.weight, inputs.divisor) if inputs.divisor is not None else (weighed, inputs.total or 1)
        self._batch_mean.note(loss)
        scaled = loss * (share * self.replica.sync.loss_factor / divisor)
        # The strategy's hooks send the gradients from in here (sync/base.py, sync/buckets.py; DDP's are torch's).
        (scaled if inputs.scaler is None else inputs.scaler.scale(scaled)).backward()
        loss = loss.detach()
        self._losses.append(loss)
        self._samples += samples
        self.sums.add(loss, numbers, samples, share, inputs.weight)

    def measure(self, inputs: StepInput) -> torch.Tensor | None:
        """Divides the gradients by the loss scale and returns their norm, a scalar; None if nothing reads it. NaN and infinity survive
        the sum, so every rank reads the same norm without a further collective."""
        if not self.looks and inputs.scaler is None:
            return None
        sync = self.replica.sync
        norm = sync.grad_norm(inputs.parameters)
        if inputs.scaler is not None:
            inverse = inputs.scaler._scale.double().reciprocal().float()
            norm = norm * inverse
            sync.scale_gradients(inverse, inputs.parameters)
        return norm

    def move(self, inputs: StepInput, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Clips the gradients and moves the weights. Returns the norm before the clipping."""
        if self._replay is not None:
            return self._replay.replay_update()
        if inputs.clip:
            norm = self.replica.sync.clip(inputs.clip, norm, inputs.parameters)
        if inputs.parameters is not None:
            self.replica.sync.forget_nonfinite()
        for optimizer in inputs.optimizers:
            optimizer.step()
        return norm

    # What a function's step and `update` have in common.

    def _moving(self, inputs: StepInput) -> StepInput:
        """Returns the step with its optimizers, by default all, and their parameters."""
        optimizers = self.replica.known(inputs.optimizers)
        scaler = inputs.scaler if inputs.scaler is not None and inputs.scaler.is_enabled() else None
        parameters, generation = self.replica.parameters_of(optimizers), self.current.generation
        return dataclasses.replace(
            inputs, optimizers=optimizers, parameters=parameters, scaler=scaler, generation=generation
        )

    def _is_usable(self, norm: torch.Tensor | None, inputs: StepInput) -> bool:
        """Returns whether the gradient is finite, or the settings use it anyway."""
        if norm is None or math.isfinite(norm):
            return True
        return not self.looks and (inputs.scaler is None or inputs.scaler.get_scale() <= LOWEST_SCALE)

    def _use(self, inputs: StepInput, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Moves the weights, and counts what the step has summed. Returns the gradient's norm before the clipping."""
        norm = self.move(inputs, norm)
        self.attempt.nonfinite_steps = 0
        samples = self._samples * inputs.weight if self.logical_workers is None else inputs.total or 0
        self.sums.count(samples, inputs.divisor)
        count_scaled_step(inputs, False, self.replica.sync)
        return norm

    def _reject(self, inputs: StepInput, scale: float | None = None) -> bool:
        """Discards a gradient that is not finite, and restores the buffers. Lowers the loss scale if that may be the cause, else skips the
        step. Collective.

        Args:
            scale: the loss scale before the step, which a skipped step restores; None: the scale is unchanged.

        Returns:
            Whether the scale is lower now.

        Raises:
            Ended: `nonfinite` or its limit ends the run.
        """
        sync = self.replica.sync
        sync.zero_grad()
        sync.forget_nonfinite()
        put_back(self.replica.model, self._before)
        finite = all(bool(torch.isfinite(loss).all()) for loss in self._losses)
        bad = [rank for rank, is_finite in enumerate(all_gather_trees(finite, self.run.world)) if not is_finite]
        if inputs.scaler is not None and not bad and inputs.scaler.get_scale() > LOWEST_SCALE:
            count_scaled_step(inputs, True, sync)
            return True
        if self.looks:
            self.attempt.skip_step(f"step {self.run.user_state.steps + 1}: {self._cause(inputs, bad)}")
        if scale is not None:
            set_scale(inputs.scaler, scale, sync)
        return False

    def _cause(self, inputs: StepInput, bad: list[int]) -> str:
        """Returns the cause of a gradient that is not finite. `bad`: the ranks whose loss is not. Collective."""
        if inputs.compute is None or not self.replica.sync.is_replicated:  # no rank has all gradients of its own
            causes = "; ".join(f"rank {rank}: loss is not finite" for rank in bad)
            return causes or "a gradient is not finite, though every loss is"
        if inputs.scaler is not None:  # what overflows at another scale is not the cause
            inputs = dataclasses.replace(inputs, scaler=torch.amp.GradScaler(self.run.world.device.type, LOWEST_SCALE))

        def again() -> list[torch.Tensor]:
            self.forward_backward(self.current.now(inputs), sums=False)
            return self._losses

        self._redraw()
        cause = divergence.diagnose(self.replica.sync, again)
        put_back(self.replica.model, self._before)
        return cause

    def _redraw(self) -> None:
        """Seeds the function's generators by (seed, step, rank)."""
        run = self.run
        self._drawing.seed(order.key(run.config.seed, run.user_state.steps, run.world.rank, order.Salt.STEP))

    # A step in parts: `backward`, perhaps of several micro-batches, and `update`.

    def accumulate(self, parts: Iterable[T]) -> Iterator[T]:
        every = list(parts)
        for count, micro in enumerate(every, 1):
            self._accumulating, self._micro_batches = len(every), count < len(every)
            try:
                with self.replica.sync.accumulate() if self._micro_batches else contextlib.nullcontext():
                    yield micro
            finally:
                self._micro_batches = False

    def backward(self, loss: torch.Tensor, inputs: StepInput) -> None:
        """Runs a backward pass. After the last micro-batch it sums the gradient over the ranks. Collective then.

        Raises `TypeError`, `ValueError` for invalid arguments. Raises `UserError` if the gradient of this step is summed already, and
        `RuntimeError` for a call out of its order."""
        sync = self.replica.sync
        checked_loss(loss)
        if self.pending and self._total is not None:
            raise sync.refuse(
                "has summed the gradient of this step's first backward()",
                "to add up several batches, go over run.iterate(loader, accumulate=k) and run.accumulate(batches)",
            )
        if isinstance(sync, Several):
            raise TypeError(
                "several models need a step that can be called, so that one learns and the others do not: "
                "run.step(lambda x: loss, x, optimizer=…) in place of run.step(loss)"
            )
        if self.run.config.micro_batch_size or self.run.config.capture != "never" or self.logical_workers is not None:
            raise TypeError(
                "micro_batch_size, capture and sync.name=exact need a step that can be called: run.step(lambda x, y: loss, x, y) in "
                "place of run.step(loss)"
            )
        if self.pending and self._versions != self._versions_of_parts():
            raise RuntimeError(
                "the gradients of a micro-batch were changed: change them after the loop of run.accumulate(), before run.update()"
            )
        inputs = inputs.of_part(self.part, whole=not self._accumulating)
        part = inputs.part
        samples = 0 if part is not None and part.samples == 0 else inputs.samples
        self._batch_mean.look_at_loss(loss, inputs, self._accumulating)
        self.attempt.unsaved.is_uneven |= part is not None and part.samples * self.run.world.size != part.total
        if not self.pending:  # an error may have ended the step before
            self._meet()
            self._forget()
            self._total = None
        self.attempt.stage = 2
        self._check_use(part, samples)
        self.pending, self._as_function, self._inputs = True, False, inputs
        self._backpropagate(inputs, loss, {}, samples)
        if self._micro_batches:
            self._versions = self._versions_of_parts()
            return
        with self.run.state.clock.synchronizing(sync.watch):
            sync.synchronize()
        self._divide(inputs)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        sync = self.replica.sync
        some_only = sync.shards_gradients and sync.is_replicated
        return [gradient._version for gradient in sync.gradients()] if some_only else []

    def _versions_of_parts(self) -> list[int]:
        return [one.grad._version for one in self.replica.model.parameters() if one.grad is not None]

    def update(self, inputs: StepInput) -> None:
        """Moves the weights with the optimizers, the clipping and the scaler of `inputs`. Collective.

        Raises:
            Ended, UserError: a gradient is not finite and the settings end the run; a gradient on one rank only was changed.
            RuntimeError: there was no `backward`, or micro-batches or samples are missing.
        """
        if not self.pending:
            raise RuntimeError("update() was called without run.backward(loss), which sums the gradient over the ranks")
        sync, part, total = self.replica.sync, self.part, self._total
        inputs = dataclasses.replace(self._inputs, optimizers=inputs.optimizers, clip=inputs.clip, scaler=inputs.scaler)
        inputs = self._moving(inputs)
        if total is None:
            raise RuntimeError(
                "update() was called before the last micro-batch of accumulate(), whose backward() sends the gradient: go "
                "over all micro-batches, and call backward() for each"
            )
        if part is not None and self._samples != part.samples:
            raise RuntimeError(
                f"the losses count {self._samples} samples, but this rank's part of the batch has {part.samples}. "
                "Micro-batches are cut from the part; batches of several parts need samples of their own, without run.part()"
            )
        if self._versions_now() != self._versions:
            raise sync.refuse(
                "sums each gradient on one rank only, and the gradients were changed between backward() and update()",
                "clip them with run.update(clip=…), or use sync.name=flat",
            )
        norm = self.measure(inputs)
        if self._is_usable(norm, inputs):
            norm = self._use(inputs, norm)
        else:
            self._reject(inputs)
        sync.zero_grad()
        self._end(total, norm)

    def _end(self, total: int | None, norm: torch.Tensor | None) -> None:
        """Ends the step, which may have moved no weight: counts steps and samples, and reports it."""
        run = self.run
        self._stand_in.close()
        self.current.end_step()
        self.attempt.stage = 0
        run.user_state.steps += 1
        run.progressed = True
        samples, run.user_state.samples = self._samples, run.user_state.samples + (total or 0)
        if self.replica.ema is not None:
            self.replica.ema.update(run.user_state.steps)
        self.pending, self._accumulating, self._samples, self._losses = False, 0, 0, []
        self._count()
        lr = next(iter(self.replica.optimizers.values())).param_groups[0].get("lr")
        self.attempt.step_done(lr, samples, norm)

    def _divide(self, inputs: StepInput) -> None:
        """Sets `_total`, and divides the summed gradients by it, unless `backward` could. Collective unless the samples of all ranks are
        known before the step. Raises `RuntimeError` for a step without samples."""
        self._total = inputs.total
        if self._total is None:
            counted = torch.tensor(self._samples)
            dist.all_reduce(counted)
            self._total = int(counted)
            if inputs.divisor is None:
                if not self._total:
                    raise RuntimeError("a step without samples: every rank gave samples=0")
                self.replica.sync.scale_gradients(torch.tensor(1.0 / self._total, device=self.run.world.device))

    def _check_use(self, part: Part | None, samples: int) -> None:
        """Warns if all ranks use all of the same batch, or of hooks at the start and after a save. Raises as `check_lengths` and
        `Replica.check_groups`."""
        self.attempt.unsaved.compare_kinds()
        self.current.check_lengths()
        self.replica.check_groups()
        is_first = not self.pending and not self.attempt.saver.steps_since
        if is_first and (self._cuts or not self.replica.sync.is_replicated):
            hooked = self.replica.hook_before_sum()
            if hooked is not None:
                # Whether a hook is linear cannot be seen, and one that prints is harmless.
                self.run.warn(
                    f"a hook on {hooked} gets the gradient of a part of the batch, before the sum. A mask or a factor is right "
                    "there. A clamp, a norm or noise gives another result than one process: change the gradient between "
                    "run.backward() and run.update(), or give the step clip=…",
                    about="hooks",
                )
        if part is None and self.same_samples and samples >= self.same_samples:  # fewer: it has taken its share
            self.run.warn(
                "all ranks were given the same batch, and each has used all of it, so a step learns no more than one rank "
                "would: give each its own samples, with torch's DistributedSampler or run.batches(), or let it take its "
                "part with run.part()"
            )
