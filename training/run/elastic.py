"""The batches of this rank, and its part of the batch under way after a rank is lost. The ranks that remain share the global batch."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..contract import UserError
from ..data import order
from ..data.batches import Batches, Part, share
from ..data.pytree import children, to_device
from ..parallel.live import RestartRequired
from ..parallel.world import World
from .step_input import StepInput

_LAST = 64


class ElasticBatches(Iterator[tuple[Any, "Part | None"]]):
    """Yields the batches of an epoch for this rank. After a loss a new loader gives the rank its share among the ranks that remain.

    Args:
        first_step: of the epoch.
    """

    def __init__(self, batches: Batches, world: World, epoch: int, first_step: int) -> None:
        self._batches, self._world, self._epoch, self._step = batches, world, epoch, first_step
        self._open()

    def _open(self) -> None:
        steps = iter(range(self._step, self._batches.division.steps))
        self._given = self._batches.epoch(self._epoch, steps=steps)
        self._generation = self._world.generation

    def __next__(self) -> tuple[Any, Part | None]:
        if self._generation != self._world.generation:
            self.close()
            self._open()
        self._current = next(self._given)
        self._step += 1
        return self._current

    def again(self) -> tuple[Any, Part | None]:
        """Returns the batch under way, as the ranks share it now."""
        if self._generation != self._world.generation:
            self._step -= 1
            next(self)
        return self._current

    def close(self) -> None:
        getattr(self._given, "close", lambda: None)()


class CurrentBatch:
    """The batch under way: what the script was given of it, and in which generation of the ranks."""

    def __init__(self, world: World, cut: order.Parts | None) -> None:
        self._world, self._cut = world, cut
        self.generation = 0
        self._item: Any = None
        self._again: Callable[[], tuple[Any, Part | None]] | None = None
        self._wholes: list[tuple[Any, Any]] = []
        """What `run.part` has given, and of what."""
        self._whole: Any = None
        self.wholes = 0
        """How often `run.part` was given another whole than before, of the batch under way."""
        self._lengths: list[int] = []
        """Of the wholes since the step before, without those that are equal."""
        self._parts: deque[int] = deque(maxlen=_LAST)
        """The `id` of each of the last ones."""

    def begin(self, item: Any, given: Iterator[Any]) -> None:
        """A batch is there: `item`, of these."""
        self._item, self._again = item, given.again if isinstance(given, ElasticBatches) else None
        self.generation, self._wholes = self._world.generation, []
        self._whole, self.wholes = None, 0
        self.end_step()

    def end_step(self) -> None:
        """What is cut next is of another step, or of an evaluation."""
        self._lengths = []

    def part(self, whole: Any) -> tuple[Any, Part]:
        """This rank's part of what every rank has, and how it counts."""
        mine, part = self._part(whole)
        if len(whole) not in self._lengths:
            self._lengths.append(len(whole))
        self.wholes += whole is not self._whole
        self._whole = whole
        self._parts.append(id(mine))
        if self._again is None and not self._wholes:
            self.generation = self._world.generation
        if self._world.live is not None:
            self._wholes.append((mine, whole))
        return mine, part

    def gave(self, piece: Any) -> bool:
        """Whether this very object is of the batch, or was given by `part`."""
        return id(piece) in self._parts or any(piece is given for given, _ in _pairs(self._item, self._item))

    def _part(self, whole: Any) -> tuple[Any, Part]:
        low, high, part = share(len(whole), self._world, self._cut)
        return whole[slice(*((low, high) if high > low else (0, 1)))], part

    def check_lengths(self) -> None:
        """What belongs to one sample, such as its crops, comes to one rank. `exact` looks at the arguments of the step itself.

        Raises:
            UserError: on all ranks: wholes of this step have other lengths than the first one, and are cut at other samples.
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
        """Returns the same step over this rank's part of the batch now.

        Raises:
            RestartRequired: the script has not got a piece of what it was called with from here.
            UserError: as `check_lengths`.
        """
        if inputs.generation == self._world.generation:
            return inputs
        self.check_lengths()
        item, part = (None, None) if self._again is None else self._again()
        pairs = [] if part is None else [*_pairs(self._item, to_device(item, self._world.device))]
        known_parts = [] if part is None else [part]

        def part_now(piece: Any) -> Any:
            for mine, whole in self._wholes:
                if piece is mine:
                    again, of = self._part(whole)
                    known_parts.append(of)
                    return again
            for given, again in pairs:
                if piece is given:
                    return again
            if isinstance(piece, tuple):
                return tuple(map(part_now, piece))
            if isinstance(piece, list) and piece and isinstance(piece[0], torch.Tensor):
                return list(map(part_now, piece))
            if isinstance(piece, Mapping):
                return {key: part_now(value) for key, value in piece.items()}
            raise RestartRequired(
                f"a rank was lost, and the step cannot be taken again: a {type(piece).__name__} that run.step(function, …) was called with "
                "is nothing that run.batches() or run.part() has given. Put what is made of a batch into the function"
            )

        batch = tuple(map(part_now, inputs.batch))
        part = known_parts[0]
        return dataclasses.replace(
            inputs, batch=batch, part=part, samples=part.samples, weight=part.weight, generation=self._world.generation
        )


def _pairs(item: Any, again: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each object in a batch, and the one in its place in a batch of the same form."""
    yield item, again
    for (_, child), (_, other) in zip(children(item), children(again)):
        yield from _pairs(child, other)
