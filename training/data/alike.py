"""Checks that a dataset is the same on every rank: its length, and a few samples. Unsorted file names, or an unseeded shuffle, give each
rank another order: the ranks would train some samples twice, and others never. A dataset that changes as it is read, such as one that
caches augmented samples, changes on each rank by other samples.

Whole numbers, such as labels, must be equal. Other numbers may differ in their last bits, where two machines decode an image: the ranks
are warned. What a dataset draws from its private generators is not compared.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from .. import generators
from ..contract import UserError, to_stderr
from ..limits import COMPARE_SECONDS
from ..parallel.exchange import all_gather_trees, raise_together
from ..parallel.packing import tensor_bytes
from ..parallel.world import World
from .batches import Seeded, loader
from .pytree import children

Values = list[Any]
"""[whether it has whole numbers alone, shape, digest] of each leaf of a sample. None: the leaf differs between two reads. False: it
differs, too, but is a single number, such as a time, or the dataset has private generators."""
SAMPLES = 16
"""Most samples to compare: fewer if they load slowly."""
DEPTH, ITEMS = 3, 20
"""Levels of attributes and lists, and items of a list, in which a dataset's generators are looked for."""
LEAVES = 32
"""Most tensors of a sample to compare."""
_NUMBER = (int, float, np.number)
_USES: dict[int, tuple[weakref.ref[Any], int]] = {}
"""`id` → (the dataset, how often a call has compared it)."""


def check_alike(dataset: Any, world: World, seed: int, workers: int, who: str, instead: str) -> None:
    """Compares the ranks' datasets: their lengths, and at the uses 1, 2, 3, 5, 9 … a few samples, other ones each time. Collective.

    Args:
        workers: 0: this process loads the samples; else a worker does, because workers would share the files that are opened here.
        who: the call that needs the dataset, for the error.
        instead: what to do with a loader of another kind.

    Warns if only numbers differ that are not whole, as those of images, or if samples differ that may have been equal at the first use.

    Raises:
        TypeError: the dataset is not map-style.
        UserError: on all ranks: the datasets differ at their first use, or in length.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{who} needs a dataset with a length and dataset[id], got a {type(dataset).__name__}: {instead}"
        )
    if world.size == 1:
        return
    uses = _uses(dataset)
    looks = uses == 0 or not (workers or uses & (uses - 1))  # with workers, their copies of the dataset change
    values = _values(dataset, seed, workers, uses) if looks else []
    every = all_gather_trees([len(dataset), uses, values], world)
    lengths = [length for length, *_ in every]
    # The ranks need not agree about the use: a rank without values is not compared.
    certain, what = _difference([theirs if its == every[0][1] else [] for _, its, theirs in every])
    uses = every[0][1]  # all ranks take the same way from here
    if len(set(lengths)) > 1:
        certain, what, uses = True, f"it has {lengths} samples, by rank", 0
    sentence = (
        f"{who} needs the same dataset on every rank, in the same order, and {what}: sort the names of files, and shuffle with a "
        "seed that all ranks have"
    )
    if uses:
        sentence = (
            f"{who} needs the same dataset on every rank, and {what}, which were equal at first. The dataset changes as it is read, or "
            "the loop changes it, on each rank by other samples: let a sample depend on its index and torch's random numbers alone, and "
            "add up over the ranks what the loop writes into it"
        )
    elif certain:
        raise_together(UserError(sentence), world)
    else:
        sentence += ", unless the ranks only decode images in different ways"
    if what and not uses:
        _USES.pop(id(dataset), None)  # what differs from the first has not changed: compare it as at the first use
    if what and world.leader:
        _warn(sentence)
    if not uses and world.leader and any(None in row for row in values):
        _warn(
            f"{who}: a sample of the dataset differs between two reads with the same random numbers of torch, numpy and Python. It draws "
            "from a private generator, or depends on earlier reads, so another number of ranks, or a resume, gives other samples"
        )


@functools.cache
def _warn(sentence: str) -> None:
    """Prints a warning once in a process."""
    to_stderr(f"warning: rank 0: {sentence}")


def _own_generators(holder: Any, depth: int = DEPTH) -> list[Any]:
    """Returns the random generators in the attributes of a dataset, and of what these hold, such as another dataset or its transforms."""
    is_generator = generators.is_generator(holder)
    if is_generator or not depth or issubclass(type(holder), (type, types.ModuleType)):
        return [holder] * is_generator
    inner = list(holder[:ITEMS]) if type(holder) in (list, tuple) else [*getattr(holder, "__dict__", {}).values()]
    return [one for item in inner for one in _own_generators(item, depth - 1)]


def _uses(dataset: Any) -> int:
    """Counts the uses of a dataset. Returns how many there were before; 0 for a list, to which there is no weak reference."""
    known, uses = _USES.get(id(dataset), (None, 0))
    uses = uses if known is not None and known() is dataset else 0
    with contextlib.suppress(TypeError):
        _USES[id(dataset)] = weakref.ref(dataset), uses + 1
    return uses


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


def _values(dataset: Any, seed: int, workers: int, use: int) -> list[Values]:
    """Returns the values of a few samples, spread over the dataset, as they are in epoch `use`. Returns [] if a sample cannot be loaded:
    the loop raises the error."""
    count = min(SAMPLES, len(dataset))
    ids = [(number * len(dataset) // count + use) % len(dataset) for number in range(count)]
    compared = _Compared(Seeded(dataset, seed, use))
    own: list[tuple[Any, Any]] = []
    try:
        own = [(generator, generators.state_of(generator)) for generator in _own_generators(dataset)]
        rows = next(loader(compared, [ids], min(workers, 1), list, pins=False)) if ids else []
        return [[one or False for one in row] for row in rows] if own else rows
    except Exception:  # noqa: BLE001
        return []
    finally:
        for generator, state in own:  # the script may have kept it
            generators.set_state(generator, state)


class _Compared(Dataset[Any]):
    """A dataset of the values to compare, so that a worker sends nothing else."""

    def __init__(self, dataset: Seeded) -> None:
        self.dataset = dataset

    def __getitems__(self, ids: list[int]) -> list[Values]:
        began, rows = time.monotonic(), []
        for index in ids:
            first, second = (digests(*self.dataset.__getitems__([index])) for _ in range(2))
            same = len(first) == len(second)  # else the sample draws from an unseeded generator
            pairs = zip(first, second) if same else ()
            rows.append([one if one == other else None if one[1] else False for one, other in pairs])
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
