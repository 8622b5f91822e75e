"""The loop of one's own: its epochs, and the batches of each. Between two batches all ranks save, or end, together."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from lockstep.training.data import order
from lockstep.training.data.batches import Batches, Part, leave_signals_to_the_rank, to_device
from lockstep.training.parallel.exchange import all_gather_trees
from lockstep.training.parallel.world import World
from lockstep.training.run.attempt import Attempt
from lockstep.training.run.own import OwnRun
from lockstep.training.run.own_step import Step

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
            self.step.check_used("epoch")
            own.end_epoch(self.attempt, count)

    def batches(self, cut: Batches) -> Iterator[Any]:
        """What is left of the epoch. Raises `UserError` where it was begun with other batches."""
        self.own.expect_data(cut.describe())
        cursor = self.own.state.cursor
        self.own.plan(cut.steps)
        return self._between_boundaries(cut.epoch(cursor.epoch, cursor.step))

    def iterate(self, loader: Iterable[Any], accumulate: int | None) -> Iterator[Any]:
        """What is left of the epoch: batches, or lists of up to `accumulate`. The cursor counts what is given. Collective.

        Raises:
            ValueError: the loaders of the ranks have different lengths.
        """
        if accumulate is not None and (type(accumulate) is not int or accumulate < 1):
            raise ValueError(f"accumulate is a number of batches from 1, got {accumulate!r}")
        own = self.own
        own.expect_data({} if accumulate is None else {"accumulate": accumulate})
        _check_lengths(loader, own.world)
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
                if part is None and step.same_samples is None:
                    step.same_samples = _same_samples(item, own.world)
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


def _check_lengths(loader: Any, world: World) -> None:
    """Raises `ValueError` where the ranks' loaders have different lengths: the ranks would wait for one another. Collective."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        length = None
    lengths = all_gather_trees(length, world)
    if None not in lengths and len(set(lengths)) > 1:
        said = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(lengths[:8]))
        raise ValueError(
            f"the loaders of the ranks have different numbers of batches ({said}): give each rank the same number, for "
            "example with torch's DistributedSampler and drop_last=True, or use run.batches()"
        )


def _same_samples(batch: Any, world: World) -> int:
    """How many samples the batch has where all ranks were given the same one; 0 where they were not, or that cannot be seen.

    Compared are the dense tensors and arrays of the batch, with their first values. Collective.
    """
    if world.size == 1:
        return 0
    try:
        samples, digest = _digest(batch)
    except Exception:  # noqa: BLE001 - tensors of some kinds have no bytes, and the batch is for the script to judge
        samples, digest = 0, ""
    return samples if len(set(all_gather_trees(digest, world))) == 1 else 0


def _digest(batch: Any) -> tuple[int, str]:
    """The length of the first tensor or array, and a hash of all; 0 where there is none."""
    leaves, samples, found = [batch], 0, hashlib.sha256()
    while leaves:
        leaf = leaves.pop(0)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            first = leaf.detach().flatten()[:4096].cpu().resolve_conj().resolve_neg().contiguous()
            values = first.view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            values = leaf.ravel()[:4096].tobytes()
        else:
            leaves += leaf.values() if isinstance(leaf, Mapping) else leaf if isinstance(leaf, (list, tuple)) else ()
            continue
        samples = samples or (len(leaf) if leaf.ndim else 1)
        found.update(repr((str(leaf.dtype), tuple(leaf.shape))).encode() + values)
    return samples, found.hexdigest()


def _lists(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` items; the last one may be shorter."""
    return iter(lambda: list(itertools.islice(items, size)), [])
