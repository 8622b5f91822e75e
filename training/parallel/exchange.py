"""Small collectives over trees of plain values (`packing`), and agreement of all ranks: on errors, on equal values, on sums.

They take few messages. A binary tree takes a sum to rank 0 and back: n − 1 messages up and n − 1 down for n ranks. The sum reaches
the last rank after 2·log₂ n of them. gloo's own sum goes around a ring, which takes 2·(n − 1) one after the other. If a tensor has
many elements, that sum takes n messages from every rank. Rank 0 gathers the trees of all ranks, and sends them to all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..contract import EXIT_FAILED, UserError, first_line, named
from .packing import broadcast_bytes, pack, unpack
from .world import World, detect

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def group_size() -> int:
    """Returns the number of ranks in the process group; 1 in a single process without a group.

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


def broadcast_tree(tree: Any, world: World, source: int = 0) -> Any:
    """Returns the tree of rank `source`, on every rank. Tensors arrive on the CPU. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return tree
    if world.live is not None:  # another rank may be `source` when it is done: all of them have a tree
        return all_gather_trees(tree, world)[source]
    packed = broadcast_bytes(pack(tree) if world.rank == source else None, world.rank, source)
    return tree if world.rank == source else unpack(packed)


def all_gather_trees(tree: Any, world: World) -> list[Any]:
    """Returns the trees of all ranks on every rank, by rank; sizes may differ. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    if world.live is None:  # not each rank's padded tree: their bytes on all ranks grow with the square of the ranks
        return list(broadcast_tree(gather_trees(tree, world), world))
    packed = pack(tree)
    return [unpack(blob) for blob in world.live.retryable(lambda: _gathered_everywhere(packed, world))]


def _gathered_everywhere(packed: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Returns the packed trees of all ranks, after all ranks have reached this call. Collective."""
    sizes = [int(size) for size in _tensors_of_all(torch.tensor(packed.numel()), world)]
    padded = F.pad(packed, (0, max(sizes) - packed.numel()))
    return [blob[:size].clone() for blob, size in zip(_tensors_of_all(padded, world), sizes)]


def gather_trees(tree: Any, world: World) -> list[Any] | None:
    """Returns the trees of all ranks on rank 0, None elsewhere. Rank 0's tree is not copied. Collective. Raises `TypeError` as `pack`."""
    if world.size == 1:
        return [tree]
    if world.live is not None:
        every = all_gather_trees(tree, world)
        return every if world.leader else None
    packed = pack(tree)
    longest = torch.tensor([packed.numel()])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    padded = F.pad(packed, (0, int(longest) - packed.numel()))  # `unpack` ignores what follows a tree
    gathered = [torch.empty_like(padded) for _ in range(world.size)] if world.leader else None
    dist.gather(padded, gathered, 0)
    return None if gathered is None else [tree, *map(unpack, gathered[1:])]


def scatter_trees(trees: list[Any] | None, world: World, source: int = 0) -> Any:
    """Returns this rank's tree of `trees`, a list by rank on rank `source`. Tensors arrive on the CPU. Collective.

    Each rank gets only its own tree, so the bytes sent grow with the number of ranks. With `broadcast_tree` of the list they
    would grow with its square.
    """
    if world.size == 1:
        assert trees is not None
        return trees[0]
    # Rank `source` has its own tree already.
    packed = [
        torch.empty(0, dtype=torch.uint8) if rank == source else pack(tree) for rank, tree in enumerate(trees or ())
    ]
    longest = torch.tensor([max((blob.numel() for blob in packed), default=0)])
    dist.broadcast(longest, source)
    received = torch.empty(int(longest), dtype=torch.uint8)
    padded = [F.pad(blob, (0, received.numel() - blob.numel())) for blob in packed]
    dist.scatter(received, padded or None, source)
    return unpack(received) if trees is None else trees[source]


def all_reduce(tensor: torch.Tensor, world: World, combine: Combine = torch.add, tag: int = 0) -> torch.Tensor:
    """Returns the tensors of all ranks, combined element by element; the same result on every rank. Collective.

    The order is always the same, so a sum has the same bits every time.

    Args:
        tensor: on the CPU, of the same shape and type on every rank; it is not changed.
        combine: returns the combination of two such tensors; must be associative up to rounding.
        tag: tag of the messages, which keeps them apart from those of another tag and of torch's collectives.
    """
    total = tensor.clone()
    if world.size == 1:
        return total
    if world.live is not None:
        return functools.reduce(combine, world.live.retryable(lambda: _tensors_of_all(tensor, world))).clone()
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


def _tensors_of_all(tensor: torch.Tensor, world: World) -> list[torch.Tensor]:
    """Gathers a tensor of every rank by one collective. In torch 2.15 only a collective takes another time limit than that of gloo's group;
    a message between two ranks does not."""
    gathered = tensor.new_empty((world.size, *tensor.shape))
    dist.all_gather_into_tensor(gathered.view(-1), tensor.reshape(-1))
    return list(gathered)


def any_rank(flag: bool, world: World) -> bool:
    """Returns whether `flag` is set on any rank; the same answer on every rank. Collective."""
    return bool(all_reduce(torch.tensor(int(flag)), world, torch.maximum))


def is_same_on_all_ranks(tree: Any, world: World) -> bool:
    """Returns whether all ranks hold the same tree, by its sha256. Collective. Raises `TypeError` as `pack`."""
    digest = int.from_bytes(hashlib.sha256(pack(tree).numpy().tobytes()).digest()[:7], "big")
    highest, lowest = all_reduce(torch.tensor([digest, -digest]), world, torch.maximum).tolist()
    return bool(highest == -lowest)


@contextlib.contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Runs a block that may fail on some ranks. Then all ranks raise (`raise_together`), or none. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    raise_together(error, world)


def raise_together(error: Exception | None, world: World) -> None:
    """Raises on all ranks if any rank has an error. Collective.

    Otherwise ranks without an error would wait in the next collective for a rank that is gone.

    Raises:
        UserError: a rank has a `UserError`; the message names the ranks unless all have the same error.
        RuntimeError: a rank has another error.
    """
    if world.size == 1 and error is not None:
        raise error
    if not any_rank(error is not None, world):
        return
    code = error.code if isinstance(error, UserError) else 0
    every = all_gather_trees(None if error is None else [code, str(error) or type(error).__name__], world)
    failed = [(rank, *entry) for rank, entry in enumerate(every) if entry is not None]
    message = failed[0][2]
    same = [rank for rank, _, text in failed if text == message]
    if len(same) < len(every):
        message = f"rank {named(same)}: {message}"
    code = min(code for _, code, _ in failed)  # 0: one is no `UserError`; 1 before 2: another start may help
    if not code:
        raise RuntimeError(message) from error
    raise UserError(message, code, shared=True) from error


@contextlib.contextmanager
def waiting_for_all(world: World, what: str, seconds: float) -> Iterator[None]:
    """Runs a block as `failing_together` does, if it may take longer on some ranks than a collective may. An example is data that one
    node prepares and another has already. Collective.

    The ranks that are done wait at a barrier of a separate group, whose time limit is longer than that of collectives. Rank 0
    notices at once that a rank is gone.

    Args:
        what: name of the work, for the message.
        seconds: longest wait for the others.

    Raises:
        UserError: as `raise_together`; or the others took longer than `seconds`, or one of them is gone.
    """
    if world.size == 1:
        yield
        return
    any_rank(False, world)  # all are here, within the limit of collectives: the group below is formed within its own
    timeout = timedelta(seconds=seconds)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # each rank is a member
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    began = time.monotonic()
    try:
        dist.monitored_barrier(group, timeout)
    except RuntimeError as caught:
        over, cause = time.monotonic() - began >= seconds, first_line(caught).partition(" in ")[0]
        raise UserError(
            f"not all ranks could {what}{f' within {seconds:.0f} s' if over else ''} ({cause}): check their nodes",
            code=EXIT_FAILED,
        ) from error
    dist.destroy_process_group(group)
    raise_together(error, world)
