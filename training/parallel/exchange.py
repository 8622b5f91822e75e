"""Small collectives over plain values, without pickle, and what all ranks agree on: errors, whether they hold the same, sums.

A *tree* is nested dicts, lists and tuples of tensors, numbers, texts, booleans and None: what a checkpoint holds.
`split` turns it into a JSON value and tensors; `join` is the inverse. Both keep every bit.

Few messages, whatever the number of ranks: a binary tree takes a sum to rank 0 and back: n − 1 messages up and n − 1 down for n
ranks, the last rank is reached in 2·log₂ n of them. gloo's own sum goes around a ring, which takes 2·(n − 1) one after the
other, and n of them from every rank where a tensor has many elements. What all ranks have gathers rank 0, and sends it on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..contract import EXIT_FAILED, UserError, named
from ..limits import BEAT_SECONDS
from . import process
from .world import World, detect

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Element types by their names in the safetensors format."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}

_PLAIN = {int, float, str, bool, type(None)}
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_TORCH = Path(torch.__file__).parent
_WAITING_CODE = tuple(str(_TORCH / folder) + os.sep for folder in ("distributed", "nn/parallel", "autograd"))
"""Python code of torch that calls collectives. DDP's reducer waits inside a backward pass, below autograd."""
_OPS = str(_TORCH / "_ops.py")
"""Between a functional collective and C++."""
_OF_NCCL = re.compile(r"NCCL (communicator was aborted|operation timed out|Async Error)")
"""torch's own words where the communicator of a collective was aborted before it (2.15): a plain `RuntimeError`, too."""
_OF_GLOO = re.compile(r"gloo/transport/\S+\] (Timed out|Connection closed|Read error|Write error)")
"""gloo's own words where another rank did not come, or is gone: also in a process group of the script's."""


def group_size() -> int:
    """Ranks of the process group; 1 in a single process that has no group.

    Raises:
        UserError: the launcher started several ranks, but there is no process group: each would train alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    size = detect(os.environ).size
    if size > 1:
        raise UserError(
            f"this process is one of {size} ranks, but there is no process group: "
            "call torch.distributed.init_process_group first"
        )
    return 1


def split(tree: Any, name: Callable[[tuple[str, ...]], str] | None = None) -> tuple[Any, dict[Any, torch.Tensor]]:
    """(a JSON value with keys in the places of the tensors, the tensors by these keys). Raises `TypeError` for other types.

    Args:
        name: makes a tensor's key of its place, the keys of the mappings and the positions that lead to it; None: they are numbered.
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
                raise TypeError(f"a tree cannot hold {value.dtype}")
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
        raise TypeError(f"a tree cannot hold a {type(value).__name__}")

    return walk(tree, ()), tensors


def join(plain: Any, tensors: Mapping[Any, torch.Tensor]) -> Any:
    """The inverse of `split`. Raises `ValueError` for a value that `split` did not make."""
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
    about = [{"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)} for t in tensors.values()]
    head = json.dumps([plain, about]).encode()
    parts = [torch.tensor(list(len(head).to_bytes(8, "little")), dtype=torch.uint8), as_bytes(head)]
    parts += [tensor_bytes(t) for t in tensors.values()]
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
    return join(plain, dict(enumerate(tensors)))


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
    if world.live is not None:  # another rank may be `source` when it is done: all of them have a tree
        return all_gather_trees(tree, world)[source]
    packed = broadcast_bytes(pack(tree) if world.rank == source else None, world, source)
    return tree if world.rank == source else unpack(packed)


def broadcast_bytes(packed: torch.Tensor | None, world: World, source: int = 0) -> torch.Tensor:
    """What rank `source` has, a uint8 tensor [bytes] on the CPU, on every rank; None elsewhere. Collective."""
    mine = packed if packed is not None and world.rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([mine.numel()])
    dist.broadcast(length, source)
    if world.rank != source:
        mine = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(mine, source)
    return mine


def all_gather_trees(tree: Any, world: World) -> list[Any]:
    """The trees of all ranks on every rank, by rank; sizes may differ. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    if world.live is None:
        return list(broadcast_tree(gather_trees(tree, world), world))
    packed = pack(tree)
    return [unpack(blob) for blob in world.live.together(lambda: _gathered_everywhere(packed, world))]


def _gathered_everywhere(packed: torch.Tensor, world: World) -> list[torch.Tensor]:
    """No rank has it before all have come here."""
    sizes = torch.zeros(world.size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([packed.numel()]))
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: packed.numel()] = packed
    gathered = torch.empty(world.size * len(padded), dtype=torch.uint8)
    dist.all_gather_into_tensor(gathered, padded)
    return [blob[:size].clone() for blob, size in zip(gathered.split(len(padded)), sizes.tolist())]


def gather_trees(tree: Any, world: World) -> list[Any] | None:
    """The trees of all ranks on rank 0, None elsewhere. Rank 0's own tree is not copied. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    if world.live is not None:
        every = all_gather_trees(tree, world)
        return every if world.leader else None
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


def reduced(tensor: torch.Tensor, world: World, combine: Combine = torch.add, tag: int = 0) -> torch.Tensor:
    """The tensors of all ranks, combined element by element; the same result on every rank. Collective.

    The order is always the same, so a sum has the same bits every time.

    Args:
        tensor: on the CPU, of the same shape and type on every rank; it is not changed.
        combine: of two such tensors, the result; must be associative up to rounding.
        tag: of the messages: those of another tag, and of torch's collectives, are not taken for them.
    """
    if world.live is None or world.size == 1:
        return _reduced(tensor, world, combine, tag)
    return functools.reduce(combine, world.live.together(lambda: _tensors_of_all(tensor, world))).clone()


def _tensors_of_all(tensor: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Collectives alone take another time limit than that with which gloo's group was made (torch 2.15): no message does."""
    gathered = tensor.new_empty((world.size, *tensor.shape))
    dist.all_gather_into_tensor(gathered.view(-1), tensor.reshape(-1))
    return list(gathered)


def _reduced(tensor: torch.Tensor, world: World, combine: Combine, tag: int) -> torch.Tensor:
    total = tensor.clone()
    if world.size == 1:
        return total
    received, reach = torch.empty_like(total), 1
    while reach < world.size and not world.rank & reach:
        if world.rank + reach < world.size:
            dist.recv(received, world.rank + reach, tag=tag)
            total = combine(total, received)
        reach *= 2
    if world.rank:
        dist.send(total, world.rank - reach, tag=tag)
        dist.recv(total, world.rank - reach, tag=tag)
    while reach := reach // 2:
        if world.rank + reach < world.size:
            dist.send(total, world.rank + reach, tag=tag)
    return total


def on_any(flag: bool, world: World) -> bool:
    """Whether `flag` is set on any rank; the same answer on every rank. Collective."""
    return bool(reduced(torch.tensor(int(flag)), world, torch.maximum))


def same_on_all(tree: Any, world: World) -> bool:
    """Whether all ranks hold the same tree (`exchange`), by its sha256. Collective. Raises `TypeError` as `exchange.pack`."""
    digest = int.from_bytes(hashlib.sha256(pack(tree).numpy().tobytes()).digest()[:7], "big")
    most, least = reduced(torch.tensor([digest, -digest]), world, torch.maximum).tolist()
    return bool(most == -least)


@contextlib.contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Runs a part that may fail on some ranks; then all raise (`raise_together`), or none does. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    raise_together(error, world)


def is_collective(error: BaseException) -> bool:
    """Whether an error comes out of a collective or the store, not of this rank's own work: by its type and by where it was raised.

    torch has a type for its own errors and NCCL's. gloo throws a plain `RuntimeError`: in a call of torch.distributed, in a `wait()`, or
    in a backward pass. Other errors are thrown there, too, but only gloo's leaves a connection to another rank broken: one of ours, or
    of a process group that the script has made, which the message tells.
    """
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    if _OF_NCCL.match(str(error)):
        return True
    return _raised_in_waiting(error) and (process.broken() or bool(_OF_GLOO.search(str(error))))


def _raised_in_waiting(error: BaseException) -> bool:
    """Whether the innermost frame of Python is in torch's code for collectives, or in a function that calls `wait()`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = next((frame.f_code for frame in reversed(frames) if frame.f_code.co_filename != _OPS), None)
    return code is not None and (code.co_filename.startswith(_WAITING_CODE) or "wait" in code.co_names)


def is_of_torch_distributed(error: BaseException) -> bool:
    """Whether a function of torch.distributed has raised it, such as for a process group that is gone."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.distributed")


def raise_together(error: Exception | None, world: World) -> None:
    """Every rank calls this after a step that may fail on some of them; all raise, or none does.

    Without it the ranks that succeeded would wait in the next collective for one that is gone.

    Raises:
        UserError: some rank had one; the message names the ranks unless all of them had the same.
        RuntimeError: some rank had another error.
    """
    if world.size == 1 and error is not None:
        raise error
    if not on_any(error is not None, world):
        return
    code = error.code if isinstance(error, UserError) else 0
    code, message = _summary(
        all_gather_trees(None if error is None else [code, str(error) or type(error).__name__], world)
    )
    if not code:
        raise RuntimeError(message) from error
    shared = UserError(message)
    shared.shared = True
    shared.code = code
    raise shared from error


def _summary(errors: list[Any]) -> tuple[int, str]:
    """(the exit code, where all errors are `UserError`s, else 0; the message), from [exit code or 0, message] of each rank, or None."""
    failed = [(rank, *error) for rank, error in enumerate(errors) if error is not None]
    message = failed[0][2]
    same = [rank for rank, _, text in failed if text == message]
    if len(same) < len(errors):
        message = f"rank {named(same)}: {message}"
    return min(code for _, code, _ in failed), message  # 1 before 2: another start may help


class NotHeardError(UserError):
    """Ranks that are at work have said nothing for too long: they are gone or hang."""

    code = EXIT_FAILED


@contextlib.contextmanager
def waiting_for_all(world: World, what: str, seconds: float, silent: float) -> Iterator[None]:
    """`failing_together` for a part that may take longer on some ranks than a collective may: data that one node prepares and
    another has already. Every rank takes it once, each in its own time. Collective.

    The others do not wait in a collective, whose time limit is for what hangs. They ask the store, where each rank that is at
    work says so, and meet in a collective when all are done.

    Args:
        what: they do, for the message.
        seconds: that the others wait, and the setting that says so.
        silent: seconds without a word from those that still do it.

    Raises:
        UserError: as `raise_together`; or the others took longer.
        NotHeardError: they have said nothing.
    """
    if world.size == 1:
        yield
        return
    store = _get_default_store()
    done = threading.Event()
    threading.Thread(target=_beat, args=(store, what, done), name="patience", daemon=True).start()
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    finally:
        done.set()
        store.add(f"lockstep/{what}/done", 1)
    _wait(lambda name: store.add(f"lockstep/{what}/{name}", 0), world, what, seconds, silent)
    raise_together(error, world)


def _beat(store: dist.Store, what: str, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(RuntimeError):  # the store is gone: its rank has ended, and the launcher ends this one
            store.add(f"lockstep/{what}/beats", 1)


def _wait(count: Callable[[str], int], world: World, what: str, seconds: float, silent: float) -> None:
    began = heard = time.monotonic()
    beats, pause = -1, 0.01
    while (finished := count("done")) < world.size:
        if (now := count("beats")) != beats:
            beats, heard = now, time.monotonic()
        left = f"{world.size - finished} of {world.size} ranks"
        if time.monotonic() - began > seconds:
            raise UserError(
                f"{left} still {what} after {seconds:.0f} s: check their nodes, or wait longer with data.prepare_timeout"
            )
        if time.monotonic() - heard > silent:
            raise NotHeardError(f"{left} should {what} and have said nothing for {silent:.0f} s: check their nodes")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
