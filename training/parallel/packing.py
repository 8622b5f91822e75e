"""Trees of plain values as tensors of bytes, without pickle.

A *tree* is nested dicts, lists and tuples of tensors, numbers, texts, booleans and None: what a checkpoint holds.
`split` turns it into a JSON value and tensors; `join` is the inverse. Both keep every bit.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Element types by their names in the safetensors format."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}

_PLAIN = {int, float, str, bool, type(None)}


def split(tree: Any, name: Callable[[tuple[str, ...]], str] | None = None) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Returns (a JSON value with keys in the places of the tensors, the tensors by these keys). Raises `TypeError` for other types.

    Args:
        name: returns a tensor's key from its path, the keys and positions that lead to it; None: keys are numbers.
    """
    tensors: dict[Any, torch.Tensor] = {}

    def all_of(values: Iterable[Any], place: tuple[str, ...]) -> list[Any]:
        return [
            value if type(value) in _PLAIN else walk(value, (*place, str(number)))  # Python's generator has 625 numbers
            for number, value in enumerate(values)
        ]

    def walk(value: Any, place: tuple[str, ...]) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPE_NAMES:
                raise TypeError(f"{'/'.join(place)}: a tree cannot hold a tensor of {value.dtype}")
            key = len(tensors) if name is None else name(place)
            tensors[key] = value.detach()
            return {"$tensor": key}
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: walk(inner, (*place, key)) for key, inner in value.items()}
            items = [(walk(key, place), inner) for key, inner in value.items()]
            return {"$items": [[key, walk(inner, (*place, str(key)))] for key, inner in items]}
        if isinstance(value, tuple):
            return {"$tuple": all_of(value, place)}
        if isinstance(value, list):
            return all_of(value, place)
        if isinstance(value, np.generic) and not isinstance(value, (str, bytes)):  # np.float64 is a float, too
            return {"$scalar": walk(torch.from_numpy(np.array(value)), place)}
        if isinstance(value, (int, float, str)):  # an enumeration's member, for example
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
            return {"$array": walk(torch.from_numpy(native), place)}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": walk(as_bytes(bytes(value)), place)}
        if isinstance(value, (set, frozenset)):
            return {"$set" if isinstance(value, set) else "$frozenset": all_of(value, place)}
        raise TypeError(f"{'/'.join(place)}: a tree cannot hold {getattr(value, 'dtype', 'a')} {type(value).__name__}")

    return walk(tree, ()), tensors


def join(plain: Any, tensors: Mapping[Any, torch.Tensor]) -> Any:
    """Returns the inverse of `split`. Raises `ValueError` for a value that `split` did not make."""
    if isinstance(plain, list):
        return [join(inner, tensors) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    if set(plain) == {"$tensor"}:
        key = plain["$tensor"]
        if not isinstance(key, (int, str)) or key not in tensors:
            raise ValueError(f"no tensor {key!r}")
        return tensors[key]
    if set(plain) == {"$items"}:
        return {join(key, tensors): join(inner, tensors) for key, inner in plain["$items"]}
    if len(plain) == 1:
        ((mark, inner),) = plain.items()
        if mark in _COLLECTIONS:
            return _COLLECTIONS[mark](join(value, tensors) for value in inner)
        if mark in ("$array", "$scalar", "$bytes"):
            return _kept_as_tensor(mark, join(inner, tensors))
    if any(key.startswith("$") for key in plain):
        raise ValueError(f"unknown mark {sorted(plain)[0]!r}")
    return {key: join(inner, tensors) for key, inner in plain.items()}


def _kept_as_tensor(mark: str, tensor: Any) -> Any:
    """Returns the value that `split` stored as a tensor. Raises `ValueError` if `tensor` does not fit `mark`."""
    if isinstance(tensor, torch.Tensor):
        if mark == "$array":
            return tensor.numpy()
        if mark == "$scalar" and tensor.ndim == 0:
            return tensor.numpy()[()]
        if mark == "$bytes" and tensor.ndim == 1:
            return tensor.numpy().tobytes()
    raise ValueError(f"{mark} of no such tensor")


def pack(tree: Any) -> torch.Tensor:
    """Returns a tree as one uint8 tensor [bytes] on the CPU. Raises `TypeError` for a value that no tree can hold."""
    plain, tensors = split(tree)
    about = [{"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)} for t in tensors.values()]
    head = json.dumps([plain, about]).encode()
    return torch.cat([as_bytes(len(head).to_bytes(8, "little") + head), *map(tensor_bytes, tensors.values())])


def unpack(packed: torch.Tensor) -> Any:
    """Returns the inverse of `pack`: the tree of a uint8 tensor [bytes] on the CPU."""
    length = int.from_bytes(bytes(packed[:8].tolist()), "little")
    plain, about = json.loads(packed[8 : 8 + length].numpy().tobytes())
    tensors, at = [], 8 + length
    for entry in about:
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        size = math.prod(shape) * dtype.itemsize
        tensors.append(packed[at : at + size].clone().view(dtype).reshape(shape))
        at += size
    return join(plain, dict(enumerate(tensors)))


def as_bytes(data: bytes) -> torch.Tensor:
    """Returns a copy of the bytes as a uint8 tensor [len(data)]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as a uint8 tensor [bytes] on the CPU. A view, if the tensor is contiguous and on the CPU already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def broadcast_bytes(packed: torch.Tensor | None, rank: int, source: int = 0) -> torch.Tensor:
    """Returns the tensor of rank `source` on every rank. Collective.

    Args:
        packed: a uint8 tensor [bytes] on the CPU; None on the other ranks.
    """
    mine = packed if packed is not None and rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([mine.numel()])
    dist.broadcast(length, source)
    if rank != source:
        mine = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(mine, source)
    return mine


def storage(tensor: torch.Tensor) -> int | None:
    """Returns the address of a tensor's memory. None: it has none, because it is lazy, sparse, sharded or wraps other tensors."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except Exception:  # noqa: BLE001 - they raise nearly anything
        return None


def storages(tree: Any) -> set[int | None]:
    """Returns the addresses of a tree's tensors, and None, so that a tensor without an address counts as one of them."""
    found: set[int | None] = {None}
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.add(storage(one))
        elif isinstance(one, (dict, list, tuple, set, deque)):  # a state may have a list of a million numbers
            waiting += [item for item in (one.values() if isinstance(one, dict) else one) if type(item) not in _PLAIN]
    return found
