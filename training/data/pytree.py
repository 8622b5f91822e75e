"""Batches of any loader as trees of tensors: functions that move them to the device, cut micro-batches, and copy them for a recording."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def to_device(item: Any, device: torch.device) -> Any:
    """Returns the same tree with its tensors on the device. An object with a method `to(device)` moves itself. All types stay."""
    if callable(getattr(item, "to", None)) and not isinstance(item, type):
        # Tensors, PackedSequence, transformers' BatchEncoding, …
        try:
            moved = item.to(device, non_blocking=True)
        except TypeError:  # a `to` that takes nothing but the device
            moved = item.to(device)
        return item if moved is None else moved  # it has moved itself
    holds_more = isinstance(item, (Mapping, list, tuple)) or children(item)
    return _rebuilt(item, lambda value: to_device(value, device)) if holds_more else item


def _rebuilt(item: Any, change: Callable[[Any], Any]) -> Any:
    """Returns a list, tuple, mapping or dataclass of the same type, with changed entries."""
    make = getattr(item, "_make", type(item))  # a named tuple
    if isinstance(item, tuple):
        return make(map(change, item))
    changed = {key: change(value) for key, value in children(item)}
    if isinstance(item, Mapping) and not isinstance(item, MutableMapping):
        return make(changed)
    clone = copy.copy(item)  # with what else it has: a default, an attribute
    for key, value in changed.items():
        if isinstance(item, (list, Mapping)):
            clone[key] = value
        else:
            object.__setattr__(clone, key, value)  # of a frozen dataclass, too
    return clone


def leaves(item: Any) -> list[torch.Tensor]:
    """Returns the tensors of a tree of lists, tuples, mappings and dataclasses, in order."""
    if isinstance(item, torch.Tensor):
        return [item]
    return [leaf for _, child in children(item) for leaf in leaves(child)]


def children(item: Any) -> list[tuple[Any, Any]]:
    """Returns (key, entry) of each entry of a list, tuple, mapping or dataclass; [] for another value."""
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (list, tuple)):
        return list(enumerate(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [
            (field.name, getattr(item, field.name)) for field in dataclasses.fields(item) if hasattr(item, field.name)
        ]
    return []


def _holds_parts(item: Any) -> bool:
    """Returns whether the entries are parts of a batch. A list of other values than tensors is a list of samples."""
    return isinstance(item, (Mapping, tuple)) or (isinstance(item, list) and bool(item) and torch.is_tensor(item[0]))


def cut(item: Any, low: int, high: int, count: int, copies: bool = False) -> Any:
    """Returns samples `low` to `high` of a batch of `count`: of its tensors, arrays, lists of samples, and objects with a method `cut`.

    Args:
        copies: whether to copy tensors: some kernels choose their algorithm by the address of a tensor.

    Raises:
        TypeError: a part of the batch is not one entry a sample.
    """
    if hasattr(item, "cut"):
        return item.cut(low, high)
    if _holds_parts(item):
        return _rebuilt(item, lambda value: cut(value, low, high, count, copies))
    if not hasattr(item, "__getitem__") or len(item) != count:
        raise TypeError(
            f"the step cuts a batch of {count} samples, and a part of it is a {type(item).__name__} that is not one "
            "entry a sample: give step(function, *batch) tensors whose first dimension is the batch"
        )
    piece = item[low:high]
    return piece.clone() if copies and isinstance(piece, torch.Tensor) else piece


def mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the same tree with each part of the batch, as `cut` tells them apart, replaced by `change(part)`."""
    return _rebuilt(item, lambda value: mapped(value, change)) if _holds_parts(item) else change(item)


def pieces(item: Any) -> list[Any]:
    """Returns the parts that `cut` slices: tensors, arrays and lists of samples; no object with a method `cut`."""
    if hasattr(item, "cut"):
        return []
    if _holds_parts(item):
        return [piece for _, value in children(item) for piece in pieces(value)]
    return [item] if hasattr(item, "__getitem__") and getattr(item, "shape", None) != () else []


def recorded(item: Any) -> Any:
    """Returns a copy whose tensors a recorded step reads. Raises `TypeError` for a part that is no tensor: a replay would not read it."""
    if hasattr(item, "recorded"):
        return item.recorded()
    if isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, (list, tuple, Mapping)):
        return _rebuilt(item, recorded)
    raise TypeError(f"a {type(item).__name__} in the batch is no tensor")


def fill(kept: Any, item: Any) -> bool:
    """Copies `item` into the result of `recorded`. Returns False if it does not fit."""
    if hasattr(kept, "fill") and not isinstance(kept, torch.Tensor):
        return isinstance(item, type(kept)) and kept.fill(item)
    if isinstance(kept, torch.Tensor):
        if not isinstance(item, torch.Tensor) or kept.shape != item.shape or kept.dtype != item.dtype:
            return False
        kept.copy_(item)
        return True
    if isinstance(kept, Mapping):
        return isinstance(item, Mapping) and kept.keys() == item.keys() and all(fill(kept[k], item[k]) for k in kept)
    return isinstance(item, (list, tuple)) and len(kept) == len(item) and all(map(fill, kept, item))
