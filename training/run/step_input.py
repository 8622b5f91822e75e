"""The input of one step: the loss of this rank's part of a batch, in micro-batches, and the samples of all ranks. The step sums the
loss over them, and the numbers that its function returns with the loss (`loss, {"accuracy": hits}`). After the loss of a rank the
ranks that remain share the batch under way (`CurrentBatch`)."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..config import LOGGED, Config
from ..contract import UserError
from ..data import order, pytree
from ..data.batches import ElasticBatches, Part, share
from ..observe.steps import mean_loss
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.live import RestartRequired
from ..parallel.world import World
from ..sync.base import GradientSync, capturing
from .attempt import Attempt
from .run import Run

Numbers = Mapping[str, "float | torch.Tensor"]
"""The numbers that a step's function returns with its loss: name → sum over the samples of the call."""
Compute = Callable[..., "torch.Tensor | tuple[torch.Tensor, Numbers]"]
Divisor = float | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StepInput:
    """The loss of this rank's part, and how its gradient moves the weights. The script gives some fields; `of_part`,
    `in_micro_batches` and `Step` fill in the others."""

    compute: Compute | None = None
    """The function of the step; None: the loss is computed already, and cannot be computed again."""
    batch: tuple[Any, ...] = ()
    given_samples: int | None = None
    """Samples of this rank by the script's argument; None: no argument."""
    divisor: Divisor = None
    """The divisor of a loss that is a sum, over all ranks; None: the loss is a mean."""
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """The optimizers that step; (): all."""
    clip: float = 0.0
    """Largest norm of the gradient; 0: no clipping."""
    scaler: Any = None
    """A `torch.amp.GradScaler`; None: the loss is not scaled."""
    samples: int = 0
    total: int | None = None
    """Samples of all ranks; None: not known yet."""
    weight: float = 1.0
    micro_batch_size: int = 0
    """Samples of a micro-batch, approximately; 0: all at once."""
    part: Part | None = None
    """This rank's part of the global batch; None: unknown."""
    generation: int = 0
    """The generation of the ranks that share the batch."""
    parameters: set[torch.Tensor] | None = None
    """The parameters whose gradients make the step; None: all trained parameters."""

    def of_part(self, part: Part | None, whole: bool = True) -> StepInput:
        """Returns a copy with the numbers of the rank's part, if known.

        Args:
            whole: whether the loss is that of the whole part, not of a micro-batch.

        Raises:
            TypeError: the number of samples in the loss is unknown.
            ValueError: the number of samples is negative.
        """
        samples = self.given_samples
        if samples is None:
            if part is None or not whole:
                raise TypeError(
                    "say how many samples the loss is of, step(…, samples=…): it is known only of whole batches of run.part(), and of "
                    "run.batches() within its loop, which a prefetcher ends before the last step"
                )
            samples = part.samples
        if samples < 0:
            raise ValueError(f"samples is the number of this rank's samples, got {samples}")
        if part is None:
            return replace(self, samples=samples)
        return replace(self, samples=samples, total=part.total, weight=part.weight, part=part)

    def in_micro_batches(self, size: int, sync: GradientSync) -> StepInput:
        """Returns a copy in micro-batches of about `size` samples; 0: all at once.

        Raises:
            TypeError, RuntimeError, UserError: the step cannot be cut.
        """
        part, in_parts = self.part, sync.batch_parts is not None
        if part is not None and self.samples != part.samples:
            raise RuntimeError(
                f"the loss counts {self.samples} samples, but this rank's part of the batch has {part.samples}"
            )
        if in_parts and (part is None or not part.num_parts):
            raise sync.refuse(
                "needs to know which samples of the global batch a rank has",
                "go over run.batches(dataset, global_batch_size), or give every rank the whole batch and take run.part(batch)",
            )
        if not self.batch and (size or in_parts):
            setting = "micro_batch_size" if size else "sync.name=exact"
            raise TypeError(
                f"{setting} cuts what the function is called with: run.step(lambda x, y: loss, x, y) in place of "
                "run.step(lambda: loss)"
            )
        return replace(self, samples=int(self.samples), micro_batch_size=size)

    def result(self, first: int, end: int, copies: bool) -> tuple[torch.Tensor, Numbers]:
        """Returns the loss of these samples, and the numbers that the function returns with it. Raises `TypeError`, `ValueError`.

        Args:
            copies: whether the function gets copies of the tensors, even for all samples.
        """
        uncut = (first, end) == (0, self.samples) and not copies
        assert self.compute is not None
        batch = self.batch if uncut else pytree.cut(self.batch, first, end, self.samples, copies)
        result = self.compute(*batch)
        with_numbers = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
        loss, numbers = result if with_numbers else (result, {})
        return checked_loss(loss), _checked_numbers(numbers)

    def of_samples(self, low: int, high: int) -> StepInput:
        """Returns the input of these samples of this rank alone."""
        assert self.part is not None
        batch = pytree.cut(self.batch, low, high, self.samples)
        return replace(self, batch=batch, samples=high - low, part=replace(self.part, samples=high - low))

    def micro_batches(self, low: int, high: int) -> tuple[tuple[int, int], ...]:
        """Returns (first, last + 1) sample of each micro-batch in this range. Micro-batches have about the same size."""
        samples, multiple = high - low, self.part.multiple if self.part is not None else 1
        if not self.micro_batch_size or samples <= self.micro_batch_size:
            return ((low, high),)
        count = -(-samples // max(self.micro_batch_size // multiple * multiple, multiple))
        ranges = (order.bounds(samples, at, count, multiple) for at in range(count))
        return tuple((low + first, low + end) for first, end in ranges if end > first)


_LAST = 64


class CurrentBatch:
    """The batch under way: its item, the pieces that `run.part` has returned, and the generation of the ranks that share it."""

    def __init__(self, world: World, cut: order.Parts | None) -> None:
        self._world, self._cut = world, cut
        self.generation = 0
        self._item: Any = None
        self._again: Callable[[], tuple[Any, Part]] | None = None
        self._wholes: list[tuple[Any, Any]] = []
        """(part, whole) of each call of `run.part`, under `launch --live`."""
        self._lengths: list[int] = []
        """The different lengths of the wholes since the last step."""
        self._parts: deque[int] = deque(maxlen=_LAST)
        """The `id` of each of the last `_LAST` parts."""

    def begin(self, item: Any, given: Iterator[Any]) -> None:
        """Begins a batch: `item` of the iterator `given`."""
        self._item, self._again = item, given.again if isinstance(given, ElasticBatches) else None
        self.generation, self._wholes = self._world.generation, []
        self.end_step()

    def end_step(self) -> None:
        """Forgets the lengths of the wholes: the next whole belongs to another step, or to an evaluation."""
        self._lengths = []

    def part(self, whole: Any) -> tuple[Any, Part]:
        """Returns this rank's part of a batch that every rank has, and its place in the global batch."""
        mine, part = self._part(whole)
        if len(whole) not in self._lengths:
            self._lengths.append(len(whole))
        self._parts.append(id(mine))
        if self._again is None and not self._wholes:
            self.generation = self._world.generation
        if self._world.live is not None:
            self._wholes.append((mine, whole))
        return mine, part

    def gave(self, piece: Any) -> bool:
        """Returns whether this object, by identity, is a piece of the batch or a result of `part`."""
        return id(piece) in self._parts or any(piece is given for given, _ in _pairs(self._item, self._item))

    def left(self, inputs: StepInput) -> int:
        """Returns how many samples of the item the arguments of a step have, if they have some of its rows; else 0."""
        tensors = [leaf for leaf in tree_leaves(inputs.batch) if isinstance(leaf, torch.Tensor)]
        rows = {(leaf.dtype, leaf.shape[1:]) for leaf in tree_leaves(self._item) if isinstance(leaf, torch.Tensor)}
        some = all((one.dtype, one.shape[1:]) in rows and one.ndim > 0 and len(one) < inputs.samples for one in tensors)
        return len(tensors[0]) if tensors and some else 0

    def _part(self, whole: Any) -> tuple[Any, Part]:
        low, high, part = share(len(whole), self._world, self._cut)
        return whole[slice(*((low, high) if high > low else (0, 1)))], part

    def check_lengths(self) -> None:
        """Checks that `run.part` cuts all wholes of a step at the same samples, so that the entries of one sample, such as its crops, come
        to one rank. `exact` checks the arguments of the step instead.

        Raises:
            UserError: on all ranks: the lengths of two wholes are cut at different samples.
        """
        size = self._world.size
        for length in self._lengths if self._cut is None else ():
            first = self._lengths[0]
            if any(rank * first // size * length != rank * length // size * first for rank in range(size)):
                raise UserError(
                    f"run.part() cuts {first} and {length} entries for one step, and {size} ranks do not divide both at the same samples: "
                    f"make both multiples of {size}, or cut one tensor of sample numbers and take the entries by these"
                )

    def now(self, inputs: StepInput) -> StepInput:
        """Returns the step over this rank's present part of the batch, which changes when a rank is lost.

        Raises:
            RestartRequired: an argument is no piece of the batch and no result of `part`.
        """
        if inputs.generation == self._world.generation:
            return inputs
        given = [(mine, *self._part(whole)) for mine, whole in self._wholes]
        if self._again is not None:
            item, part = self._again()
            moved = pytree.to_device(item, self._world.device)
            given += [(before, again, part) for before, again in _pairs(self._item, moved)]
        parts: list[Part] = []

        def part_now(piece: Any) -> Any:
            for before, again, part in given:
                if piece is before:
                    parts.append(part)
                    return again
            raise RestartRequired(
                f"a rank was lost, and the step cannot be taken again: a {type(piece).__name__} that run.step(function, …) was called with "
                "is nothing that run.batches() or run.part() has given. Put what is made of a batch into the function"
            )

        batch = pytree.mapped(inputs.batch, part_now)
        if not parts:
            raise RestartRequired("a rank was lost, and the step cannot be taken again: its batch has nothing to cut")
        part = parts[0]
        return replace(
            inputs, batch=batch, part=part, samples=part.samples, weight=part.weight, generation=self._world.generation
        )


def _pairs(item: Any, again: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object of a batch with its counterpart in a batch of the same structure."""
    yield item, again
    for (_, child), (_, other) in zip(pytree.children(item), pytree.children(again)):
        yield from _pairs(child, other)


def divisor_of_all(divisor: Divisor, part: Part | None, world: World) -> Divisor:
    """Returns the divisor of all ranks. A tensor is this rank's count: its sum over the ranks is a float64 scalar on the device, without a
    wait. A number counts for all ranks already. Collective. Raises `TypeError` for a tensor of more than one element."""
    if not isinstance(divisor, torch.Tensor):
        return divisor
    if divisor.numel() != 1:
        raise TypeError(
            f"divisor is one number, or this rank's own in a tensor, got a tensor of shape {list(divisor.shape)}"
        )
    total = divisor.detach().reshape(()).to(world.device, torch.float64, copy=True)
    if part is not None and not part.samples:
        total.zero_()  # a sample of another rank stands in
    with contextlib.nullcontext() if world.live is None else world.live.not_retryable("a divisor that the ranks sum"):
        if world.size > 1:
            dist.all_reduce(total)
    return total


def checked_loss(loss: Any) -> torch.Tensor:
    """Returns the loss. Raises `TypeError` unless it is a tensor of one element."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is the mean over this rank's samples, one number; got {what}")
    return loss


def check_name(name: Any) -> None:
    """Raises `ValueError` for a name that no metric can have."""
    if not isinstance(name, str) or not re.fullmatch(LOGGED, name):
        raise ValueError(f"what is logged has a name of letters, digits and _, at most 64; got {name!r}")


def _checked_numbers(numbers: Numbers) -> Numbers:
    """Raises `ValueError` for a name that no metric can have, `TypeError` for a value that is not one number."""
    for name, value in numbers.items():
        check_name(name)
        if name == "loss":
            raise ValueError("a step shows its loss as train_loss anyway: give what it returns besides another name")
        if not isinstance(value, Real) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
            raise TypeError(
                f"the function of a step returned {name} as {type(value).__name__}: return one number, the sum over its samples"
            )
    return numbers


def count_scaled_step(inputs: StepInput, overflow: bool, sync: GradientSync) -> None:
    """Tells the scaler, if there is one, whether the step overflowed: it lowers its scale, or counts a step without overflow."""
    if inputs.scaler is None:
        return
    for optimizer in inputs.optimizers:
        overflows = torch.full((), float(overflow), device=sync.world.device)
        inputs.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {overflows.device: overflows}
    set_scale(inputs.scaler, None, sync)


def set_scale(scaler: Any, scale: float | None, sync: GradientSync) -> None:
    """Sets the scale of the loss. None: the scaler chooses it from the step."""
    before = scaler.get_scale() if sync.has_memory else None  # waits for the device
    scaler.update(scale)
    if before is not None and (after := scaler.get_scale()) != before:
        sync.gradients_rescaled(after / before)


class StepSums:
    """The sums of the step under way. If the step moves the weights, `count` adds them to those of the epoch (`TrainState.losses`).

    The names of the numbers are those of the first step. All ranks call the same methods in the same order.
    """

    def __init__(self, run: Run, attempt: Attempt) -> None:
        self._run, self._attempt = run, attempt
        self.values = torch.zeros_like(run.state.losses)
        """float64 [2 + names], as in the state; under `exact` the sums of all ranks, once they are summed."""
        self.values[:2] = run.state.last
        self._named = False
        """Whether a step of this attempt has shown the names of its numbers."""

    def begin(self) -> None:
        """Clears the sums: a step begins, or is computed again."""
        self.values.zero_()
        self._run.state.last = self.values

    def add(self, loss: torch.Tensor, numbers: Mapping[str, Any], samples: int, share: float, weight: float) -> None:
        """Adds the loss and numbers of some of this rank's samples. Raises `UserError` for other names than before.

        Args:
            samples: number of samples; 0: a stand-in batch, which adds nothing.
            share: factor of the loss.
            weight: factor of the numbers, which are sums over the samples.
        """
        self._expect(sorted(numbers))
        if not samples:
            return
        self.values[0].add_(loss.double() if share == 1.0 else loss.double() * share)
        for index, name in enumerate(self._run.user_state.measured, 2):
            number = numbers[name]
            on_device = isinstance(number, torch.Tensor) and number.device == loss.device
            if not on_device and capturing(loss):
                raise ValueError(f"the function returns {name} as a number, which a replay would not compute again")
            self.values[index].add_(number.detach().reshape(()) if on_device else float(number), alpha=weight)

    def _expect(self, names: list[str]) -> None:
        kept, state = self._run.user_state, self._run.state
        if names != kept.measured:
            if self._named or self._attempt.reading.within_epoch:
                raise UserError(
                    f"the function of a step returned {_listed(names)}, and the steps before {_listed(kept.measured)}: return the same "
                    "names in every step of a start"
                )
            kept.measured = names
            self.values = self._run.state.last = self.values.new_zeros(2 + len(names))
            state.losses = torch.cat([state.losses[:2], state.losses.new_zeros(len(names))])
        self._named = True

    def agree(self, refused: UserError | None = None) -> None:
        """Compares the numbers' names on all ranks, after the forward passes of an attempt's first step. A rank without samples learns
        the names. The step marks them as known once no lost rank can make it compare them again.

        Collective until then. Raises `UserError` on all ranks.

        Args:
            refused: why this rank has skipped its part of the step, so that it does not know the names.
        """
        if self._run.world.size == 1 or "numbers" in self._attempt.known:
            return
        raise_together(refused, self._run.world)
        every = all_gather_trees(self._run.user_state.measured if self._named else None, self._run.world)
        known = {rank: names for rank, names in enumerate(every) if names is not None}
        first, names = next(iter(known.items()))
        for rank, others in known.items():
            if others != names:
                error = UserError(
                    f"the function of a step returned {_listed(names)} on rank {first}, and {_listed(others)} on rank {rank}: return "
                    "the same names on every rank"
                )
                raise_together(error, self._run.world)
        self._expect(names)

    def count(self, samples: float, divisor: Divisor) -> None:
        """Adds the sums of a step that has moved the weights to those of the epoch. Their weight is the divisor, if there is one. A recipe
        shows the mean over its samples, even if it minimises a sum.

        Args:
            samples: this rank's samples in the step, times their weight.
        """
        run = self._run
        weight: float | torch.Tensor = samples
        if divisor is not None and not isinstance(run.config, Config):
            weight = divisor if run.world.leader or run.state.of_all else 0.0
        self.values[1].fill_(weight)
        run.state.losses += self.values

    def mean_loss(self) -> float | None:
        """Returns the mean loss of all ranks; None if the step moved no weight. Collective."""
        return mean_loss(*self._run.state.over_ranks(self.values[:2]).tolist())


def _listed(names: list[str]) -> str:
    return f"the numbers {', '.join(names)}" if names else "no numbers"
