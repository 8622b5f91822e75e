"""Small collectives over trees of tensors and plain values, without pickle.

A *tree* is nested dicts, lists and tuples of tensors, numbers, texts, booleans and None: what a checkpoint holds.
`split` turns it into a JSON value and a list of tensors; `join` is the inverse. Both keep every bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.training.contract import UserError
from lockstep.training.parallel.world import World, detect

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Element types by their names in the safetensors format."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}

_PLAIN = {int, float, str, bool, type(None)}


def group_size(group: dist.ProcessGroup | None = None) -> int:
    """Ranks of the process group; 1 in a single process that has no group.

    Raises:
        UserError: the launcher started several ranks, but there is no process group: each would train alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    size = detect(os.environ).size
    if size > 1:
        raise UserError(
            f"this process is one of {size} ranks, but there is no process group: "
            "call torch.distributed.init_process_group first"
        )
    return 1


def split(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """(a JSON value in which tensors are numbered, the tensors in that order). Raises `TypeError` for other types."""
    tensors: list[torch.Tensor] = []

    def walk(value: Any) -> Any:
        if type(value) in _PLAIN:  # first: Python's generator alone has 625 numbers
            return value
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPE_NAMES:
                raise TypeError(f"a tree cannot hold {value.dtype}")
            tensors.append(value.detach())
            return {"$tensor": len(tensors) - 1}
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: walk(inner) for key, inner in value.items()}
            return {"$items": [[walk(key), walk(inner)] for key, inner in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [walk(inner) for inner in value]}
        if isinstance(value, list):
            return [walk(inner) for inner in value]
        if isinstance(value, np.generic) and not isinstance(value, (str, bytes)):  # np.float64 is a float, too
            return {"$scalar": walk(torch.from_numpy(np.array(value)))}
        if isinstance(value, (int, float, str)):  # an enumeration's member, for example
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            native = value.astype(value.dtype.newbyteorder("="), order="C", copy=True)
            return {"$array": walk(torch.from_numpy(native))}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": walk(as_bytes(bytes(value)))}
        if isinstance(value, (set, frozenset)):
            return {"$set" if isinstance(value, set) else "$frozenset": [walk(inner) for inner in value]}
        raise TypeError(f"a tree cannot hold a {type(value).__name__}")

    return walk(tree), tensors


def join(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `split`. Raises `ValueError` for a value that `split` did not make."""
    if isinstance(plain, list):
        return [join(inner, tensors) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    if set(plain) == {"$tensor"}:
        index = plain["$tensor"]
        if not isinstance(index, int) or not 0 <= index < len(tensors):
            raise ValueError(f"no tensor {index!r}")
        return tensors[index]
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
    """The value that `split` stored as a tensor. Raises `ValueError` if `tensor` does not fit `mark`."""
    if isinstance(tensor, torch.Tensor):
        if mark == "$array":
            return tensor.numpy()
        if mark == "$scalar" and tensor.ndim == 0:
            return tensor.numpy()[()]
        if mark == "$bytes" and tensor.ndim == 1:
            return tensor.numpy().tobytes()
    raise ValueError(f"{mark} of no such tensor")


def pack(tree: Any) -> torch.Tensor:
    """A tree as one uint8 tensor [bytes] on the CPU. Raises `TypeError` for a value that no tree can hold."""
    plain, tensors = split(tree)
    about = [{"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)} for t in tensors]
    head = json.dumps([plain, about]).encode()
    parts = [torch.tensor(list(len(head).to_bytes(8, "little")), dtype=torch.uint8), as_bytes(head)]
    parts += [tensor_bytes(t) for t in tensors]
    return torch.cat(parts)


def unpack(packed: torch.Tensor) -> Any:
    """The inverse of `pack`: the tree of a uint8 tensor [bytes] on the CPU."""
    length = int.from_bytes(bytes(packed[:8].tolist()), "little")
    plain, about = json.loads(packed[8 : 8 + length].numpy().tobytes())
    tensors, at = [], 8 + length
    for entry in about:
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        size = math.prod(shape) * dtype.itemsize
        tensors.append(packed[at : at + size].clone().view(dtype).reshape(shape))
        at += size
    return join(plain, tensors)


def as_bytes(data: bytes) -> torch.Tensor:
    """A copy of the bytes as a uint8 tensor [len(data)]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a uint8 tensor [bytes] on the CPU. A view, if the tensor is contiguous and on the CPU already."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def broadcast_tree(tree: Any, world: World, source: int = 0) -> Any:
    """The tree of rank `source`, on every rank. Tensors arrive on the CPU. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return tree
    packed = pack(tree) if world.rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([packed.numel()])
    dist.broadcast(length, source)
    if world.rank != source:
        packed = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(packed, source)
    return tree if world.rank == source else unpack(packed)


def all_gather_trees(tree: Any, world: World) -> list[Any]:
    """The trees of all ranks on every rank, by rank; sizes may differ. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    return [unpack(blob) for blob in all_gather_rows(pack(tree))]


def all_gather_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors [rows, …] of all ranks, by rank. Only the number of rows may differ between ranks. Collective."""
    size = dist.get_world_size()
    length = torch.tensor([len(tensor)], device=tensor.device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length)
    rows = [int(count) for count in lengths]
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded)
    return [tensor_rows[:count] for tensor_rows, count in zip(gathered, rows)]


def gather_trees(tree: Any, world: World) -> list[Any] | None:
    """The trees of all ranks on rank 0, None elsewhere. Rank 0's own tree is not copied. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    packed = pack(tree)
    longest = torch.tensor([packed.numel()])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = torch.zeros(int(longest), dtype=torch.uint8)
    padded[: packed.numel()] = packed
    gathered = [torch.empty_like(padded) for _ in range(world.size)] if world.leader else None
    dist.gather(padded, gathered, 0)
    # A packed tree carries its own sizes, so the padding behind it is not looked at.
    return None if gathered is None else [tree, *(unpack(blob) for blob in gathered[1:])]


def scatter_trees(trees: list[Any] | None, world: World, source: int = 0) -> Any:
    """This rank's tree out of `trees`, which only rank `source` needs to have, by rank. Tensors arrive on the CPU. Collective.

    Each rank gets only its own tree: the bytes sent grow with the number of ranks. With `broadcast_tree` of the list they
    would grow with its square.
    """
    if world.size == 1:
        assert trees is not None
        return trees[0]
    packed = None if trees is None else [pack(tree) for tree in trees]
    longest = torch.tensor([0 if packed is None else max(blob.numel() for blob in packed)])
    dist.broadcast(longest, source)
    received, padded = torch.empty(int(longest), dtype=torch.uint8), None
    if packed is not None:
        padded = [torch.zeros(int(longest), dtype=torch.uint8) for _ in packed]
        for room, blob in zip(padded, packed):
            room[: blob.numel()] = blob
    dist.scatter(received, padded, source)
    return unpack(received)
