"""Lockstep's order over any map-style dataset, for a loop of one's own: which samples a rank gets, and in which batch.

A sample's transforms draw from generators that are seeded by (seed, epoch, id): what comes out does not depend on how many
workers there are, how far they run ahead, or where a resumed run began.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.training.contract import UserError
from lockstep.training.data import order
from lockstep.training.parallel.world import World
from lockstep.training.resilience.preempt import ASKING

_SALT = 11  # apart from the keys of the order and of the augmentation


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one global batch."""

    samples: int
    """In this rank's part; 0 where it is empty, and one sample stands in for it."""
    total: int
    """In the global batch."""


class Batches:
    """The batches of one rank over `dataset`, epoch after epoch.

    Args:
        dataset: has a length, and `dataset[id]` for ids from 0.
        global_batch_size: samples per step, all ranks together.
        uneven: what an epoch's last global batch does where it is short, and a batch that the ranks cannot share
            equally: `drop` leaves it out, `pad` fills it up from the epoch's start, `weight` gives the ranks unequal parts.
        workers: processes that load and transform samples; 0: this one.
        collate: makes a batch of a list of samples; None: torch's.

    Raises:
        UserError: the dataset is too small for a step, or the ranks cannot share a batch as `uneven` says.
        TypeError: the dataset has no length.
    """

    def __init__(
        self, dataset: Dataset[Any], world: World, seed: int, global_batch_size: int, *, shuffle: bool, uneven: str,
        workers: int, collate: Callable[[list[Any]], Any] | None,
    ) -> None:  # fmt: skip
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"batches() needs a dataset with a length and dataset[id], got a {type(dataset).__name__}: "
                "hand any other loader to run.iterate(loader)"
            )
        if uneven not in ("drop", "pad", "weight"):
            raise UserError(f"uneven is drop | pad | weight, got {uneven!r}")
        if type(global_batch_size) is not int or global_batch_size < 1:
            raise UserError(f"global_batch_size is a number of samples from 1, got {global_batch_size!r}")
        order.check_division(global_batch_size, world.size, 1, uneven)
        self.dataset, self.world, self.seed = dataset, world, seed
        self.count, self.size, self.shuffle, self.uneven = len(dataset), global_batch_size, shuffle, uneven
        self.workers, self.collate = workers, collate
        self.steps = order.steps_per_epoch(self.count, self.size, uneven)

    def describe(self) -> dict[str, Any]:
        """What a start in the middle of an epoch must be the same in."""
        return {
            "samples": self.count, "global_batch_size": self.size, "shuffle": self.shuffle, "uneven": self.uneven,
        }  # fmt: skip

    def _ids(self, epoch: int, step: int) -> tuple[torch.Tensor, Part]:
        global_ids = order.global_ids(self.count, self.seed, epoch, step, self.size, self.uneven, self.shuffle)
        rank_ids = order.part(global_ids, self.world.rank, self.world.size)
        return (rank_ids if len(rank_ids) else global_ids[:1]), Part(len(rank_ids), len(global_ids))

    def epoch(self, epoch: int, first_step: int) -> Iterator[tuple[Any, Part]]:
        """(batch, part) of each step of an epoch from `first_step` on. Close the iterator to end its workers early."""
        parts: deque[Part] = deque()
        loader = DataLoader(
            _Seeded(self.dataset, self.seed, epoch),
            batch_sampler=_Drawn(self._draw(epoch, range(first_step, self.steps), parts)),
            num_workers=self.workers,
            collate_fn=self.collate,
            pin_memory=self.world.device.type == "cuda",
            generator=torch.Generator(),  # else an iterator draws from the program's own
        )
        leave_signals_to_the_rank(loader)
        for batch in loader:
            yield batch, parts.popleft()

    def _draw(self, epoch: int, steps: range, parts: deque[Part]) -> Iterator[list[int]]:
        """The ids of each step, as the loader asks for them, some steps ahead; notes the parts in the same order."""
        for step in steps:
            ids, part = self._ids(epoch, step)
            parts.append(part)
            yield ids.tolist()


class _Drawn(Sampler[list[int]]):
    """A sampler of batches that is gone through once."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def leave_signals_to_the_rank(loader: Any) -> None:
    """Makes a `DataLoader`'s processes outlive the signals that ask for an early end; any other loader is left alone.

    A cluster sends them to every process of a job. A loader that lost its processes would fail, and the rank not save.
    """
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, _Deaf):
        loader.worker_init_fn = _Deaf(loader.worker_init_fn)


class _Deaf:
    """A `worker_init_fn`: of the signals that ask for an early end, only the rank's own TERM, at its end, counts."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        for name in ASKING:
            if name != "TERM":
                signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):  # macOS has none; there a TERM ends the process, as torch has it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_with_the_rank, args=(os.getppid(),), daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _end_with_the_rank(rank: int) -> None:
    """A handler would not know who has sent the signal."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)


class _Seeded(Dataset[Any]):
    """A dataset whose samples draw from generators of their own; the program's are as they were before."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """The samples of a batch, as `DataLoader` asks for them."""
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return [self._sample(index) for index in indices]
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])

    def _sample(self, index: int) -> Any:
        secret = order.key(self.seed, self.epoch, index, _SALT)
        random.seed(secret)
        np.random.seed(secret)
        torch.default_generator.manual_seed(secret)  # torch.manual_seed asks every kind of device, 0.2 ms a sample
        return self.dataset[index]


def to_device(item: Any, device: torch.device) -> Any:
    """The same tree with its tensors on the device. Whatever has a `to(device)` of its own is moved by that, and everything
    keeps its type."""
    if isinstance(item, torch.Tensor):
        return item.to(device, non_blocking=True)
    if callable(getattr(item, "to", None)) and not isinstance(
        item, type
    ):  # PackedSequence, transformers' BatchEncoding, …
        return _by_itself(item, device)
    if isinstance(item, Mapping):
        return _mapping(item, {key: to_device(value, device) for key, value in item.items()})
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return item._make(to_device(value, device) for value in item)  # type: ignore[attr-defined]
    if isinstance(item, (list, tuple)):
        return _sequence(item, [to_device(value, device) for value in item])
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return _dataclass(item, device)
    return item


def _by_itself(item: Any, device: torch.device) -> Any:
    try:
        moved = item.to(device, non_blocking=True)
    except TypeError:  # a `to` that takes nothing but the device
        moved = item.to(device)
    return item if moved is None else moved  # it has moved itself


def _mapping(item: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if type(item) is dict:
        return moved
    if not isinstance(item, MutableMapping):
        return type(item)(moved)  # type: ignore[call-arg]
    clone = copy.copy(item)  # with what else it has: a default, an attribute
    for key, value in moved.items():
        clone[key] = value
    return clone


def _sequence(item: list[Any] | tuple[Any, ...], moved: list[Any]) -> Any:
    if isinstance(item, tuple):
        return type(item)(moved)
    clone = copy.copy(item)
    clone[:] = moved
    return clone


def _dataclass(item: Any, device: torch.device) -> Any:
    clone = copy.copy(item)
    for field in dataclasses.fields(item):
        if hasattr(item, field.name):
            object.__setattr__(clone, field.name, to_device(getattr(item, field.name), device))  # frozen ones, too
    return clone
