"""Checks that a dataset is the same on every rank: its length, and a few samples. Unsorted file names, or an unseeded shuffle, give each
rank another order: the ranks would train some samples twice, and others never.

Draws from a dataset's private generators may differ, and so may the last bits of an image that two machines decode.
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

from ..contract import UserError
from ..limits import COMPARE_SECONDS
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.world import World
from .batches import Seeded, loader
from .pytree import children

Values = list[Any]
"""The compared values of a sample: [shape, some numbers] of each tensor, or a hash of its texts; None: not comparable."""
SAMPLES = 16
"""Most samples to compare: fewer if they load slowly."""
NUMBERS, LEAVES = 64, 32
"""Most numbers of a tensor, and most tensors of a sample, to compare."""
TOLERANCE = 0.02
"""Tolerated difference, as a fraction of the largest number: two decoders may differ by a few of 255 levels."""
_COMPARED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""`id` → dataset that was compared."""


def check_alike(dataset: Any, world: World, seed: int, workers: int, who: str, instead: str) -> None:
    """Compares the ranks' datasets: their lengths, and at the first use a few samples. Collective.

    Args:
        workers: 0: this process loads the samples; else a worker does, because workers would share the files that are opened here.
        who: the call that needs the dataset, for the error.
        instead: what to do with a loader of another kind.

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
    different = len(set(lengths)) > 1
    if what := f"it has {lengths} samples, by rank" if different else _difference([theirs for _, theirs in every]):
        error = UserError(
            f"{who} needs the same dataset on every rank, in the same order, and {what}: sort the names of files, and shuffle with a "
            "seed that all ranks have"
        )
        raise_together(error, world)
    with contextlib.suppress(TypeError):  # a list has no weak reference: it is compared again
        _COMPARED[id(dataset)] = dataset


def check_alike_whole(whole: Any, world: World) -> str:
    """Compares the whole batches from which the ranks cut their parts. Returns a sentence if numbers differ that a random transform may
    have made, else "". Collective.

    Raises:
        UserError: on all ranks: whole numbers of samples, such as their labels or indices in a dataset, differ.
    """
    ids = _ids(whole)
    values = _of_leaf(whole) if ids is None and isinstance(whole, (torch.Tensor, np.ndarray)) else None
    every = all_gather_trees([len(whole), hashlib.sha256(ids or b"").hexdigest(), [values]], world)
    first = every[0]
    other = [rank for rank, values in enumerate(every) if values[:2] != first[:2]]
    if other:
        raise_together(
            UserError(
                f"run.part(batch) needs the same batch on every rank, and rank {other[0]} has another one than rank 0: draw it from a "
                "separate generator, which run.keep(…) keeps, since a rank may have drawn more from torch's; and add up over the ranks "
                "what they have measured"
            ),
            world,
        )
    if what := _difference([[values] for *_, values in every]):
        return f"run.part(batch) needs the same batch on every rank, and {what.partition(' (')[0]}: are they transforms that are drawn?"
    return ""


def _ids(whole: Any) -> bytes | None:
    """Returns the whole numbers of the samples as bytes; None: there are none. A text may be a path, which differs between nodes."""
    if isinstance(whole, torch.Tensor):
        real = whole.is_floating_point() or whole.is_complex() or whole.is_quantized
        array = None if real or whole.layout is not torch.strided or whole.ndim != 1 else whole.cpu().numpy()
    elif isinstance(whole, np.ndarray):
        array = whole if whole.ndim == 1 and whole.dtype.kind in "biu" else None
    elif isinstance(whole, (list, tuple, range)) and all(isinstance(one, (int, np.integer)) for one in whole):
        return repr([int(one) for one in whole]).encode()
    else:
        return None
    return None if array is None else array.dtype.str.encode() + array.tobytes()


def _difference(every: list[list[Values]]) -> str:
    """Returns a sentence about a rank whose samples differ from those of the first rank with samples; "": there is none."""
    first_rank, first = next(((rank, values) for rank, values in enumerate(every) if values), (0, []))
    for rank, values in enumerate(every):
        for number, (expected, actual) in enumerate(zip(first, values)):
            counts_differ = bool(expected and actual) and len(expected) != len(actual)
            if counts_differ or not all(map(_near, expected, actual)):
                return f"rank {rank} has other samples than rank {first_rank} (number {number + 1} of {len(first)} that were compared)"
    return ""


def _near(expected: Any, actual: Any, tolerance: float = TOLERANCE) -> bool:
    if expected is None or actual is None:
        return True
    if type(expected) is not type(actual) or isinstance(expected, str):
        return bool(expected == actual)
    (shape, numbers), (other_shape, others) = expected, actual
    if shape != other_shape:
        return False
    scale = max(float(values.nan_to_num().abs().max()) if len(values) else 0.0 for values in (numbers, others))
    return torch.allclose(numbers, others, rtol=0.0, atol=tolerance * scale, equal_nan=True)


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
            first, second = (_of_sample(*self.dataset.__getitems__([index])) for _ in range(2))
            same = len(first) == len(second)  # else the sample draws from an unseeded generator
            rows.append([one if _near(one, other, 0.0) else None for one, other in zip(first, second)] if same else [])
            if time.monotonic() - began > COMPARE_SECONDS:
                break
        return rows


def _of_sample(sample: Any) -> Values:
    numbers: list[list[Any]] = []
    texts, waiting = hashlib.sha256(), [sample]
    while waiting and len(numbers) < LEAVES:
        leaf = waiting.pop(0)
        if isinstance(leaf, (str, bytes)):
            texts.update(leaf.encode() if isinstance(leaf, str) else leaf)
            continue
        are_numbers = isinstance(leaf, (list, tuple)) and all(isinstance(one, (int, float)) for one in leaf)
        if not are_numbers and (entries := children(leaf)):
            waiting += [entry for _, entry in entries]
        elif (values := _of_leaf(leaf)) is not None:
            numbers.append(values)
    return [*numbers] or [texts.hexdigest()]  # a text next to numbers may be a path, which differs between nodes


def _of_leaf(leaf: Any) -> list[Any] | None:
    """Returns [shape, float64 numbers spread over the leaf]; None: the leaf has no numbers."""
    if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_complex() or leaf.is_quantized):
        return None
    array = leaf.detach() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        return None
    flat = array.reshape(-1)
    some = flat[:: max(1, -(-len(flat) // NUMBERS))]
    some = some.double().cpu() if isinstance(some, torch.Tensor) else torch.from_numpy(some.astype(np.float64))
    return [list(array.shape), some]
