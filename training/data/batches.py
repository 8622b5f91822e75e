"""The one loader: the samples of a rank at each step, from shards or from any map-style dataset.

`order` draws the global batches; `Division` gives a rank its part of each. Samples of shards (`Stored`) stay on the device
if they fit, and a batch is then a list of row numbers. Else a thread gathers the next batches from the mapped files into
pinned memory while the device computes. Samples of any other dataset come through torch's DataLoader. Their transforms draw
from generators that are seeded by (seed, epoch, id). So the samples do not depend on how many workers there are, how far
they run ahead, or where a resumed run began.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from lockstep.wire.signals import FORWARDED, signals_held_back

from ..contract import UserError
from ..generators import RngScope
from ..parallel.world import World
from . import order, pytree
from .augment import Keys, draw_keys
from .shards import Samples

DRAWN_AT_ONCE = 4096
"""Number of sample ids to draw at once for the next steps."""
AHEAD = 2
"""Batches that a thread reads ahead of the step."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one global batch."""

    samples: int
    """Samples in this rank's part; 0: the part is empty, and one sample stands in for it."""
    total: int
    """Samples in the global batch, the divisor of a mean loss."""
    weight: float = 1.0
    """Weight of each sample; not 1 if the gradient is the mean of the ranks' means (`uneven=mean`)."""
    multiple: int = 1
    """Samples of a block; micro-batches are cut between blocks."""
    parts: tuple[tuple[int, int], ...] = ()
    """(first, last + 1) of this rank's samples in each of its parts, under `sync.name=exact`."""
    first: int = 0
    """Index of the first entry of `parts` among the parts of the global batch."""
    num_parts: int = 0
    """Parts of the global batch; 0: it is cut only by ranks."""


def share(total: int, world: World, parts: order.Parts | None, multiple: int = 1) -> tuple[int, int, Part]:
    """Returns (first, last + 1) position of this rank's samples in a global batch of `total`, and their `Part`."""
    if parts is None:
        low, high = order.bounds(total, world.rank, world.size, multiple)
        return low, high, Part(high - low, total, float(high > low), multiple)
    cuts = parts.bounds(total, multiple)
    first, end = order.bounds(len(cuts), world.rank, world.size)
    mine = cuts[first:end]
    low, high = (mine[0][0], mine[-1][1]) if mine else (0, 0)
    inside = tuple((begin - low, stop - low) for begin, stop in mine)
    return low, high, Part(high - low, total, float(high > low), multiple, inside, first, len(cuts))


class Division:
    """The division of samples over ranks and steps: a function of the seed, the epoch and the step.

    Args:
        count: samples of an epoch.
        batch: samples a step, all ranks together.
        uneven: the rule for a short last global batch of an epoch, and for a batch that the ranks cannot share equally. `drop`
            leaves it out, `pad` fills it up from the epoch's start, `weight` gives the ranks unequal parts. With `mean` each
            rank takes a whole part in turn, and their means are averaged.
        multiple: a rank's part comes in blocks of this many (32 for ghost batch norm).
        parts: cut each global batch into these, whole ones to each rank, so that any number of ranks can share it.

    Raises:
        UserError: there are too few samples for a step, or the ranks cannot share a batch as `uneven` says.
    """

    def __init__(
        self, count: int, batch: int, world: World, seed: int, *, uneven: str, shuffle: bool = True, multiple: int = 1,
        parts: order.Parts | None = None,
    ) -> None:  # fmt: skip
        if parts is None:
            order.check_division(batch, world.size, multiple, uneven)
        self.count, self.batch, self.world, self.seed = count, batch, world, seed
        self.uneven, self.shuffle, self.multiple, self.parts = uneven, shuffle, multiple, parts
        self.steps = order.steps_per_epoch(count, batch, uneven)
        self._drawn: tuple[tuple[int, ...], torch.Tensor] = (), torch.empty(0)

    def part(self, epoch: int, step: int) -> tuple[torch.Tensor, Part]:
        """Returns (the ids [≥ 1] of this rank's samples, its `Part`). An empty part has one sample, which counts nothing."""
        ids = self._ids(epoch, step)
        if self.uneven == "mean":
            low, high, part = self._whole_share(len(ids))
        else:
            low, high, part = share(len(ids), self.world, self.parts, self.multiple)
        return ids[low:high] if part.samples else ids[:1], part

    def _whole_share(self, total: int) -> tuple[int, int, Part]:
        """Returns as `share`, if the ranks take whole batches in turn, as a loop over `i % world_size == rank` does."""
        size = self.world.size
        ranges = [order.bounds(self.batch, rank, size, self.multiple) for rank in range(size)]
        ranges = [(low, min(high, total)) for low, high in ranges if low < total]
        if self.world.rank >= len(ranges):
            return 0, 0, Part(0, total, 0.0, self.multiple)
        low, high = ranges[self.world.rank]
        return low, high, Part(high - low, total, total / (len(ranges) * (high - low)), self.multiple)

    def _ids(self, epoch: int, step: int) -> torch.Tensor:
        """Returns `order.global_ids` of a step, drawn for many steps at once, which costs hardly more than for one."""
        steps = -(-DRAWN_AT_ONCE // self.batch)
        block, at = divmod(step, steps)
        if self._drawn[0] != (epoch, block):
            ids = order.global_ids(self.count, self.seed, epoch, block, self.batch * steps, self.uneven, self.shuffle)
            self._drawn = (epoch, block), ids
        return self._drawn[1][at * self.batch : (at + 1) * self.batch]

    def describe(self) -> dict[str, Any]:
        """Returns the settings that a resume in the middle of an epoch may not change."""
        return {"samples": self.count, "global_batch_size": self.batch, "shuffle": self.shuffle, "uneven": self.uneven}


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of shards: `images[rows]`, uint8 images or float32 vectors."""

    images: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    keys: Keys
    """Keys of the augmentation (`draw_keys` of the epoch)."""
    filled: list[Keys] = field(default_factory=list)
    """The keys that `fill` has copied last: they change once an epoch, and a copy waits for the device."""

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        images, rows, ids, labels = map(function, (self.images, self.rows, self.ids, self.labels))
        return Batch(images, rows, ids, labels, self.keys)

    def pin_memory(self) -> Batch:
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        if self.images.device == device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, low: int, high: int) -> Batch:
        """Returns a micro-batch: samples `low` to `high`."""
        return Batch(self.images, self.rows[low:high], self.ids[low:high], self.labels[low:high], self.keys)

    def recorded(self) -> Batch:
        """Returns copies that a recorded step reads. Images that stay in place are not copied."""
        images = self.images if len(self.images) > len(self.rows) else self.images.clone()
        keys = torch.as_tensor(self.keys, dtype=torch.int64, device=self.rows.device).clone()
        return Batch(images, self.rows.clone(), self.ids.clone(), self.labels.clone(), keys)

    def fill(self, other: Batch) -> bool:
        """Copies `other` into the tensors that a recorded step reads. Returns False if its shape differs."""
        if other.rows.shape != self.rows.shape or other.images.shape != self.images.shape:
            return False
        for mine, its in ((self.rows, other.rows), (self.ids, other.ids), (self.labels, other.labels)):
            mine.copy_(its)
        if self.images is not other.images:
            self.images.copy_(other.images)
        if self.filled != [other.keys]:
            self.keys.copy_(torch.as_tensor(other.keys))  # type: ignore[union-attr]
            self.filled[:] = [other.keys]
        return True


class Stored:
    """The samples of shards, by their ids: on the device, or read from the mapped files.

    Args:
        seed: seed of the augmentation.
        resident: `auto` keeps them on the device if they take at most a quarter of its free memory (or of the rank's share of the
            host's). `always`; `never`.
    """

    def __init__(self, samples: Samples, world: World, seed: int, resident: str = "auto") -> None:
        self.samples, self.seed = samples, seed
        self.resident = fits(samples.num_bytes, world) if resident == "auto" else resident == "always"
        self._device = world.device
        if self.resident:
            images, labels = samples.all()
            self._images, self._labels = images.to(world.device), labels.to(world.device)

    def batch(self, ids: torch.Tensor, keys: Keys) -> Batch:
        if self.resident:
            ids = ids.to(self._device, non_blocking=True)
            return Batch(self._images, ids, ids, self._labels[ids], keys)
        images, labels = self.samples.take(ids)
        return Batch(images, torch.arange(len(ids)), ids, labels, keys)


def fits(num_bytes: int, world: World) -> bool:
    """Returns whether so many bytes are at most a quarter of the device's free memory, or of the rank's share of the host's."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.local_size
    return num_bytes <= free // 4


class Batches:
    """The batches of one rank, epoch after epoch.

    Args:
        source: `Stored`, or any dataset with a length and `source[id]` for ids from 0.
        workers: processes that load and transform the samples of a dataset; 0: the rank's process.
        collate: makes a batch of a list of samples; None: torch's.
    """

    def __init__(
        self, source: Stored | Dataset[Any], division: Division, *, workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.division, self.workers, self.collate = source, division, workers, collate
        self.warn: Callable[[str], None] | None = None
        """Called once with a warning if `collate` makes a sample depend on the rank's other samples, but must not."""
        self._pins = division.world.device.type == "cuda"

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Any, Part]]:
        """Yields (batch, part) of each step. Close the iterator to end its workers, or its thread, early.

        Args:
            first_step: the first step of the epoch to load. Each step is drawn when the loading of its batch begins.
        """
        steps = range(first_step, self.division.steps)
        if not isinstance(self.source, Stored):
            return self._loaded(self.source, epoch, steps)
        read = self._read(self.source, epoch, steps)
        return read if self.source.resident else _ahead(read, self._pins)

    def _read(self, stored: Stored, epoch: int, steps: Iterable[int]) -> Iterator[tuple[Any, Part]]:
        keys = draw_keys(stored.seed, epoch)
        for step in steps:
            ids, part = self.division.part(epoch, step)
            yield stored.batch(ids, keys), part

    def _loaded(self, dataset: Dataset[Any], epoch: int, steps: Iterable[int]) -> Iterator[tuple[Any, Part]]:
        parts: deque[Part] = deque()

        def draw(step: int) -> list[int]:
            ids, part = self.division.part(epoch, step)
            parts.append(part)
            return ids.tolist()

        looks = self.warn is not None and self.collate is not None and self.division.parts is not None
        collate = functools.partial(_probed, self.collate) if looks and self.collate is not None else self.collate
        ids = map(draw, steps)
        for item in loader(Seeded(dataset, self.division.seed, epoch), ids, self.workers, collate, self._pins):
            batch, depends = item if looks else (item, False)
            if depends and self.warn is not None:
                self.warn(
                    "the collate function makes another entry of a sample alone than beside the other samples of its rank (padded to the "
                    "longest, mixed, or drawn), so that it depends on the number of ranks: pad to one length, and mix inside the function "
                    "of run.step(function, …)"
                )
                self.warn = None
            yield batch, parts.popleft()


class ElasticBatches(Iterator[tuple[Any, Part]]):
    """Iterator over the batches of an epoch for this rank. After the loss of a rank a new loader has the share among the remaining ranks.

    Args:
        first_step: first step of the epoch to load.
    """

    def __init__(self, batches: Batches, world: World, epoch: int, first_step: int) -> None:
        self._batches, self._world, self._epoch, self._step = batches, world, epoch, first_step
        self._open()

    def _open(self) -> None:
        self._given = self._batches.epoch(self._epoch, self._step)
        self._generation = self._world.generation

    def __next__(self) -> tuple[Any, Part]:
        if self._generation != self._world.generation:
            self.close()
            self._open()
        self._current = next(self._given)
        self._step += 1
        return self._current

    def again(self) -> tuple[Any, Part]:
        """Returns the batch under way and this rank's present part of it."""
        if self._generation != self._world.generation:
            self._step -= 1
            next(self)
        return self._current

    def close(self) -> None:
        getattr(self._given, "close", lambda: None)()


def loader(
    dataset: Dataset[Any],
    ids: Iterable[Sequence[int]],
    workers: int,
    collate: Callable[[list[Any]], Any] | None,
    pins: bool,
    timeout: float = 0,
) -> Iterator[Any]:
    """Returns an iterator over the batches with these samples. With `timeout`, waiting longer for one is a `RuntimeError`."""
    made: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=ids,  # type: ignore[arg-type]
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pins,
        timeout=timeout,
        generator=torch.Generator(),  # else an iterator draws from the program's own
    )
    return begun(made)


def of_dataset(
    dataset: Any, world: World, seed: int, batch: int, *, shuffle: bool, uneven: str, workers: int,
    collate: Callable[[list[Any]], Any] | None, parts: order.Parts | None = None,
) -> Batches:  # fmt: skip
    """Returns the batches of a map-style dataset. Raises `UserError` for an impossible division."""
    if uneven not in ("drop", "pad", "weight"):
        raise UserError(f"uneven is drop | pad | weight, got {uneven!r}")
    if type(batch) is not int or batch < 1:
        raise UserError(f"global_batch_size is a number of samples from 1, got {batch!r}")
    division = Division(len(dataset), batch, world, seed, uneven=uneven, shuffle=shuffle, parts=parts)
    return Batches(dataset, division, workers=workers, collate=collate)


def _ahead(read: Iterator[tuple[Any, Part]], pins: bool) -> Iterator[tuple[Any, Part]]:
    """Yields the same batches, which a thread reads up to `AHEAD` batches ahead, into pinned memory if `pins`."""

    def following() -> tuple[Any, Part] | None:
        item = next(read, None)
        return (item[0].pin_memory(), item[1]) if item is not None and pins else item

    thread = ThreadPoolExecutor(1, "loader")
    try:
        waiting = deque(thread.submit(following) for _ in range(AHEAD))
        while (item := waiting.popleft().result()) is not None:
            waiting.append(thread.submit(following))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


def begun(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns the loader's iterator. A `DataLoader`'s processes survive the signals that ask for an early end.

    A cluster sends such signals to every process of a job. Without its processes the loader would fail, and the rank would not save.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    if getattr(loader.worker_init_fn, "func", None) is not _ignore_signals:
        loader.worker_init_fn = functools.partial(_ignore_signals, loader.worker_init_fn)
    if (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # it unblocks signals where it starts
    with signals_held_back():  # the processes inherit the mask: they import before they call `_ignore_signals`
        return iter(loader)


def _ignore_signals(then: Callable[[int], None] | None, worker: int) -> None:
    """Ignores in a loader's process the signals for an early end, except the rank's own TERM at its end. Calls the loader's own
    `worker_init_fn`."""
    for number in {*FORWARDED} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    waits = hasattr(signal, "sigwaitinfo")  # macOS has none; there a TERM ends the process, as torch has it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED} - ({signal.SIGTERM} if waits else set()))
    rank = multiprocessing.parent_process()  # under forkserver it is not the parent in the system's sense
    if waits and rank is not None:
        threading.Thread(target=_end_with_the_rank, args=(rank.pid,), daemon=True).start()
    if then is not None:
        then(worker)


def _end_with_the_rank(rank: int) -> None:
    """Waits in a thread for the rank's TERM, because a handler would not know the sender of a signal."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


def _probed(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, bool]:
    """Returns (the batch of a `collate_fn`, whether the first sample by itself becomes an entry that this batch does not have)."""
    first = [tree_map(_copied, samples[0])] if len(samples) > 1 else []  # before `collate` changes it
    batch = collate(samples)
    try:
        pairs = zip(pytree.leaves(batch), pytree.leaves(collate(first))) if first else ()
        entries = [
            (whole, alone) for whole, alone in pairs if whole.ndim and len(whole) == len(samples) and len(alone) == 1
        ]
        return batch, any(not _is_among(alone, whole) for whole, alone in entries)
    except Exception:  # noqa: BLE001 - it may take several samples only, or make tensors that have no rows
        return batch, False


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _is_among(entry: torch.Tensor, rows: torch.Tensor) -> bool:
    """Returns whether a tensor with one row is equal to a row of another one, NaN included. The first row is the likely one."""
    if entry.shape[1:] != rows.shape[1:]:
        return False
    equal = (((some == entry) | (entry != entry)).reshape(len(some), -1).all(1) for some in (rows[:1], rows))
    return any(bool(one.any()) for one in equal)


class Seeded(Dataset[Any]):
    """A dataset whose samples draw by seed, epoch, id and salt. It restores the program's generators after each batch."""

    def __init__(self, dataset: Any, seed: int, epoch: int, salt: order.Salt = order.Salt.SAMPLE) -> None:
        self.dataset, self.seed, self.epoch, self.salt = dataset, seed, epoch, salt

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Returns the samples of a batch, for `DataLoader`."""
        samples = []
        with RngScope(torch.device("cpu"), every=True) as drawing:
            for index in indices:
                drawing.seed(order.key(self.seed, self.epoch, index, self.salt))
                samples.append(self.dataset[index])
        return samples
