"""What all ranks agree on: errors, whether they hold the same, sums. Few messages, whatever the number of ranks.

A tree takes each of these to rank 0 and back: n − 1 messages up and n − 1 down for n ranks, the last rank is reached in
2·log₂ n of them. gloo's own sum goes around a ring, which takes 2·(n − 1) one after the other, and n of them from every rank
where a tensor has many elements. Gathering something from all ranks for all ranks is n·(n − 1) messages: it is done only where
the ranks differ.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lockstep.training.contract import UserError
from lockstep.training.parallel.exchange import broadcast_tree, gather_trees, pack
from lockstep.training.parallel.world import World

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MOST_NAMED = 8
"""Up to this many ranks a message names one by one; more are shown as ranges."""


def reduced(tensor: torch.Tensor, world: World, combine: Combine = torch.add) -> torch.Tensor:
    """The tensors of all ranks, combined element by element; the same result on every rank. Collective.

    The order is always the same, so a sum has the same bits every time.

    Args:
        tensor: on the CPU, of the same shape and type on every rank; it is not changed.
        combine: of two such tensors, the result; must be associative up to rounding.
    """
    total = tensor.clone()
    if world.size == 1:
        return total
    received, reach = torch.empty_like(total), 1
    while reach < world.size:
        if world.rank & reach:
            dist.send(total, world.rank - reach)
            break
        if world.rank + reach < world.size:
            dist.recv(received, world.rank + reach)
            total = combine(total, received)
        reach *= 2
    dist.broadcast(total, 0)
    return total


def on_any(flag: bool, world: World) -> bool:
    """Whether `flag` is set on any rank; the same answer on every rank. Collective."""
    return bool(reduced(torch.tensor(int(flag)), world, torch.maximum))


def same_on_all(tree: Any, world: World) -> bool:
    """Whether all ranks hold the same tree (`exchange`), by its sha256. Collective. Raises `TypeError` as `exchange.pack`."""
    digest = int.from_bytes(hashlib.sha256(pack(tree).numpy().tobytes()).digest()[:7], "big")
    most, least = reduced(torch.tensor([digest, -digest]), world, torch.maximum).tolist()
    return most == -least


@contextlib.contextmanager
def failing_together(world: World) -> Iterator[None]:
    """Runs a part that may fail on some ranks; then all raise (`raise_together`), or none does. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    raise_together(error, world)


def raise_together(error: Exception | None, world: World) -> None:
    """Every rank calls this after a step that may fail on some of them; all raise, or none does.

    Without it the ranks that succeeded would wait in the next collective for one that is gone.

    Raises:
        UserError: some rank had one; the message names the ranks unless all of them had the same.
        RuntimeError: some rank had another error.
    """
    own_error = None if error is None else [isinstance(error, UserError), str(error) or type(error).__name__]
    if world.size == 1 and error is not None:
        raise error
    if not on_any(error is not None, world):
        return
    errors = gather_trees(own_error, world)
    summary = (
        None
        if errors is None
        else _summary([(rank, *item) for rank, item in enumerate(errors) if item is not None], world)
    )
    by_user, message = broadcast_tree(summary, world)
    _raise(by_user, message, error)


def _summary(errors: list[tuple[int, bool, str]], world: World) -> list[Any]:
    """[whether all errors are `UserError`s, the message], from (rank, whether a `UserError`, message) of each failed rank."""
    message = errors[0][2]
    same = [rank for rank, _, text in errors if text == message]
    if len(same) < world.size:
        message = f"rank {named(same)}: {message}"
    return [all(by_user for _, by_user, _ in errors), message]


def _raise(by_user: bool, message: str, own_error: Exception | None) -> NoReturn:
    if by_user:
        shared = UserError(message)
        shared.shared = True
        raise shared from own_error
    raise RuntimeError(message) from own_error


def named(ranks: list[int]) -> str:
    """Ranks as text: `1, 5`; for many ranks their ranges, `0–511, 700`, at most `MOST_NAMED` of them."""
    if len(ranks) <= MOST_NAMED:
        return ", ".join(map(str, ranks))
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = [str(low) if low == high else f"{low}–{high}" for low, high in ranges[:MOST_NAMED]]
    left = sum(high - low + 1 for low, high in ranges[MOST_NAMED:])
    return ", ".join(parts) + (f" and {left} more" if left else "")
