"""Checks that a dataset is the same on every rank: its length, and a few samples. Unsorted file names, or an unseeded shuffle, give each
rank another order: the ranks would train some samples twice, and others never.

Whole numbers, such as labels, must be equal. Other numbers may differ in their last bits, where two machines decode an image: the ranks
are warned. What a dataset draws from its private generators is not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..contract import UserError, to_stderr
from ..limits import COMPARE_SECONDS
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.packing import tensor_bytes
from ..parallel.world import World
from .batches import Seeded, loader
from .pytree import children

Values = list[Any]
"""[whether it has whole numbers alone, shape, digest] of each leaf of a sample; None: the leaf is drawn anew each time."""
SAMPLES = 16
"""Most samples to compare: fewer if they load slowly."""
LEAVES = 32
"""Most tensors of a sample to compare."""
_NUMBER = (int, float, np.number)
_COMPARED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""`id` → dataset that was compared."""


def check_alike(dataset: Any, world: World, seed: int, workers: int, who: str, instead: str) -> None:
    """Compares the ranks' datasets: their lengths, and at the first use a few samples. Collective.

    Args:
        workers: 0: this process loads the samples; else a worker does, because workers would share the files that are opened here.
        who: the call that needs the dataset, for the error.
        instead: what to do with a loader of another kind.

    Warns if only numbers differ that are not whole, as those of images.

    Raises:
        TypeError: the dataset is not map-style.
        UserError: on all ranks: the datasets differ.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{who} needs a dataset with a length and dataset[id], got a {type(dataset).__name__}: {instead}"
        )
    if world.size == 1:
        return
    new = _COMPARED.get(id(dataset)) is not dataset  # the ranks need not agree: a rank without values is not compared
    values = _values(dataset, seed, workers) if new else []
    every = all_gather_trees([len(dataset), values], world)
    lengths = [length for length, _ in every]
    certain, what = _difference([theirs for _, theirs in every])
    if len(set(lengths)) > 1:
        certain, what = True, f"it has {lengths} samples, by rank"
    sentence = (
        f"{who} needs the same dataset on every rank, in the same order, and {what}: sort the names of files, and shuffle with a "
        "seed that all ranks have"
    )
    if certain:
        raise_together(UserError(sentence), world)
    if what and world.leader:
        to_stderr(f"warning: rank 0: {sentence}, unless the ranks only decode images in different ways")
    with contextlib.suppress(TypeError):  # a list has no weak reference: it is compared again
        _COMPARED[id(dataset)] = dataset


def check_alike_whole(whole: Any, world: World) -> None:
    """Compares the whole batches from which the ranks cut their parts. Raises `UserError` on all ranks if they differ. Collective.

    A text may be a path, which differs between nodes: of a list of texts only the length is compared.
    """
    if isinstance(whole, (list, tuple, range)) and all(isinstance(one, (int, np.integer)) for one in whole):
        whole = np.array(whole)
    leaf = _of_leaf(whole) if isinstance(whole, (torch.Tensor, np.ndarray)) else None
    every = all_gather_trees([len(whole), leaf], world)
    if other := [rank for rank, values in enumerate(every) if values != every[0]]:
        raise_together(
            UserError(
                f"run.part(batch) needs the same batch on every rank, and rank {other[0]} has another one than rank 0: draw it from a "
                "separate generator, which run.keep(…) keeps, since a rank may have drawn more from torch's; transform a rank's part "
                "after run.part(); and add up over the ranks what they have measured"
            ),
            world,
        )


def _difference(every: list[list[Values]]) -> tuple[bool, str]:
    """Returns a sentence about a rank whose samples differ from those of the first rank with samples, and whether whole numbers do.
    "": there is none."""
    first_rank, first = next(((rank, values) for rank, values in enumerate(every) if values), (0, []))
    images = ""
    for rank, values in enumerate(every):
        for number, (expected, actual) in enumerate(zip(first, values), 1):
            apart = [one[0] for one, other in zip(expected, actual) if one and other and one != other]
            apart += [True] * (bool(expected and actual) and len(expected) != len(actual))
            if apart:
                what = f"rank {rank} has other samples than rank {first_rank} (number {number} of {len(first)} that were compared)"
                if any(apart):
                    return True, what
                images = images or what
    return False, images


def _values(dataset: Any, seed: int, workers: int) -> list[Values]:
    """Returns the values of a few samples, spread over the dataset. Returns [] if a sample cannot be loaded: the loop raises the error."""
    count = min(SAMPLES, len(dataset))
    ids = [number * len(dataset) // count for number in range(count)]
    compared = _Compared(Seeded(dataset, seed, 0))
    try:
        return next(loader(compared, [ids], min(workers, 1), list, pins=False)) if ids else []
    except Exception:  # noqa: BLE001
        return []


class _Compared(Dataset[Any]):
    """A dataset of the values to compare, so that a worker sends nothing else."""

    def __init__(self, dataset: Seeded) -> None:
        self.dataset = dataset

    def __getitems__(self, ids: list[int]) -> list[Values]:
        began, rows = time.monotonic(), []
        for index in ids:
            first, second = (digests(*self.dataset.__getitems__([index])) for _ in range(2))
            same = len(first) == len(second)  # else the sample draws from an unseeded generator
            rows.append([one if one == other else None for one, other in zip(first, second)] if same else [])
            if time.monotonic() - began > COMPARE_SECONDS:
                break
        return rows


def digests(sample: Any) -> Values:
    """Returns the values of a sample, or of a batch. Leaves out texts beside numbers: they may be paths."""
    numbers: list[list[Any]] = []
    texts, waiting = hashlib.sha256(), [sample]
    while waiting and len(numbers) < LEAVES:
        leaf = waiting.pop(0)
        # Token ids: all of them count, and their number. Of several types each is a leaf.
        if isinstance(leaf, (list, tuple)) and len({*map(type, leaf)}) == 1 and isinstance(leaf[0], _NUMBER):
            leaf = np.array(leaf)
        if isinstance(leaf, (str, bytes)):
            texts.update(leaf.encode() if isinstance(leaf, str) else leaf)
        elif entries := children(leaf):
            waiting += [entry for _, entry in entries]
        elif (values := _of_leaf(leaf)) is not None:
            numbers.append(values)
    return [*numbers] or [[True, [], texts.hexdigest()]]


def _of_leaf(leaf: Any) -> list[Any] | None:
    """Returns [whether the leaf has whole numbers alone, shape, digest]; None: the leaf has no numbers. Pixels are no whole numbers."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_complex() or leaf.is_quantized:
            return None
        whole, data = not leaf.is_floating_point() and leaf.dtype != torch.uint8, tensor_bytes(leaf).numpy()
    else:
        data = np.asarray(leaf)
        if data.dtype.kind not in "biuf":
            return None
        whole = data.dtype.kind != "f" and data.dtype != np.uint8
    return [whole, [*getattr(leaf, "shape", data.shape)], hashlib.sha256(data.tobytes()).hexdigest()]
