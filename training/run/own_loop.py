"""The loop of one's own: its epochs, and the batches of each. Between two batches all ranks save, or end, together."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from training.data import order
from training.data.batches import Batches, Part, leave_signals_to_the_rank, to_device
from training.parallel.exchange import all_gather_trees
from training.parallel.world import World
from training.run.attempt import Attempt
from training.run.own import OwnRun
from training.run.own_step import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """The loop of one attempt. All ranks call the same methods in the same order."""

    own: OwnRun
    attempt: Attempt
    step: Step

    def epochs(self, count: int) -> Iterator[int]:
        own = self.own
        if own.complete(count):
            own.console.line(f"The run is complete: {count} epochs, {own.steps_done} steps.")
        while not own.complete(count):
            own.begin_epoch()
            yield own.state.cursor.epoch
            self.step.end_epoch()
            own.end_epoch(self.attempt, count)

    def batches(self, cut: Batches) -> Iterator[Any]:
        """What is left of the epoch. Raises `UserError` where it was begun with other batches."""
        self.own.expect_data(cut.describe())
        cursor = self.own.state.cursor
        self.own.plan(cut.steps)
        return self._between_boundaries(cut.epoch(cursor.epoch, cursor.step))

    def iterate(self, loader: Iterable[Any], accumulate: int | None) -> Iterator[Any]:
        """What is left of the epoch: batches, or lists of up to `accumulate`. The cursor counts what is given."""
        if accumulate is not None and (type(accumulate) is not int or accumulate < 1):
            raise ValueError(f"accumulate is a number of batches from 1, got {accumulate!r}")
        own = self.own
        own.expect_data({} if accumulate is None else {"accumulate": accumulate})
        leave_signals_to_the_rank(loader)
        passed, given = 0 if own.kept.has(loader) else own.state.cursor.step, iter(loader)
        if accumulate is not None:
            given = _lists(given, accumulate)
        next(itertools.islice(given, passed, passed), None)  # takes `passed` of them
        return self._between_boundaries((item, None) for item in given)

    def _between_boundaries(self, given: Iterator[tuple[T, Part | None]]) -> Iterator[T]:
        own, step, clock = self.own, self.step, self.own.state.clock
        own.resume_generators()
        try:
            while True:
                if not step.pending:
                    self.attempt.boundary()
                clock.begin()
                item, part = next(given, (self, None))
                if item is self:
                    own.pause_generators()
                    return
                if part is None and step.same_batch is None:
                    step.same_batch = own.world.size > 1 and _same_everywhere(item, own.world)
                clock.data_ready()
                step.begin_batch(part)
                yield to_device(item, own.world.device)
                clock.between()
                step.end_batch()
        finally:
            getattr(given, "close", lambda: None)()

    def part(self, batch: T) -> T:
        """This rank's contiguous part of a global batch. `step` then knows how many samples it has."""
        world, count = self.own.world, len(batch)  # type: ignore[arg-type]
        low, high = order.bounds(count, world.rank, world.size)
        stand_in = (0, 1) if low == high else (low, high)
        self.step.set_part(Part(high - low, count))
        return batch[slice(*stand_in)]  # type: ignore[index]

    def boundary(self) -> None:
        """Leaves where the ranks agreed to, but not within a step: no checkpoint could hold its gradients. Raises `Ended`."""
        if self.attempt.poll().stop and not self.step.pending:
            self.attempt.leave()


def _same_everywhere(batch: Any, world: World) -> bool:
    """Whether all ranks were given the same samples, as far as these are tensors. Collective."""
    leaves, found = [batch], hashlib.sha256()
    while leaves:
        leaf = leaves.pop()
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            found.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            found.update(leaf.detach().flatten()[:4096].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, Mapping):
            leaves += leaf.values()
        elif isinstance(leaf, (list, tuple)):
            leaves += leaf
    digest = found.hexdigest() if found.digest() != hashlib.sha256().digest() else ""
    every = all_gather_trees(digest, world)
    return digest != "" and len(set(every)) == 1


def _lists(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last one may be shorter."""
    return iter(lambda: list(itertools.islice(items, size)), [])
