"""Which sample is trained when: pure functions of (seed, epoch, step), with no state to save and none to rewind.

An epoch's order is a keyed permutation, evaluated only at the requested positions. It is a generalised Feistel network
over Z_a × Z_b with a·b ≥ n, walked until it lands inside n. It follows Black & Rogaway, "Ciphers with arbitrary finite
domains" (2002). A seek to any step costs the same as the next step. The order does not depend on how many
ranks share it: a rank takes its contiguous part of every global batch.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..contract import UserError

_MASK = 0xFFFFFFFF
_ROUNDS = 6
Bits = TypeVar("Bits", int, torch.Tensor)


class Salt(enum.IntEnum):
    """The last number of each `key`, so that no two purposes draw the same numbers. A value that changes changes weights."""

    ORDER = 1
    SHIFT = 2
    SHIFT_X = 3
    FLIP = 4
    FIRST_FLIP = 5
    SAMPLE = 11
    STEP = 12
    PART = 13
    EVALUATION = 14
    EVALUATED_SAMPLE = 15
    PROOF = 16


def mix(x: Bits) -> Bits:
    """A 32-bit integer hash (Wellons' `lowbias32`) of values in 0 … 2³²−1, int or int64: products stay below 2⁶³."""
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & _MASK
    return x ^ (x >> 15)


def key(*numbers: int) -> int:
    """One 32-bit key from several whole numbers; their order matters."""
    state = 0x9E3779B9
    for number in numbers:
        for half in (number & _MASK, number >> 32 & _MASK):
            state = mix(state ^ half) + 0x9E3779B9 & _MASK
    return state


def permute(positions: torch.Tensor, n: int, secret: int) -> torch.Tensor:
    """Position → sample id, a bijection of 0 … n−1 for each `secret`. int64 in, int64 out, any shape."""
    a = math.isqrt(max(n - 1, 0)) + 1
    b = -(-n // a)
    ids = _feistel(positions, a, b, secret)
    outside = ids >= n
    while bool(outside.any()):  # at most a of the a·b values lie outside
        ids = torch.where(outside, _feistel(ids, a, b, secret), ids)
        outside = ids >= n
    return ids


def _feistel(x: torch.Tensor, a: int, b: int, secret: int) -> torch.Tensor:
    left, right = x % a, x // a
    for number in range(0, _ROUNDS, 2):
        left = (left + mix(right ^ key(secret, number))) % a
        right = (right + mix(left ^ key(secret, number + 1))) % b
    return right * a + left


def steps_per_epoch(n: int, batch: int, uneven: str) -> int:
    """Steps that an epoch over `n` samples takes. Raises `UserError` where there would be none."""
    if uneven == "pad" and batch > n:
        raise UserError(
            f"a global batch of {batch} would contain samples twice, because there are only {n}: make it smaller"
        )
    steps = n // batch if uneven == "drop" else -(-n // batch)
    if steps == 0:
        raise UserError(
            f'a global batch of {batch} is larger than the {n} samples: make it smaller, or choose uneven="weight"'
        )
    return steps


def global_ids(
    n: int, seed: int, epoch: int, step: int, batch: int, uneven: str = "drop", shuffle: bool = True
) -> torch.Tensor:
    """The sample ids [≤ batch] of one global batch, the same at every world size.

    Args:
        n: samples in the training set.
        step: step within the epoch.
        batch: global batch size.
        uneven: the last batch of an epoch is filled up from the epoch's start with `pad` and short with `weight` and `mean`.
    """
    last = (step + 1) * batch
    positions = torch.arange(step * batch, last if uneven == "pad" else max(min(last, n), step * batch))
    positions = positions % n if uneven == "pad" else positions
    return permute(positions, n, key(seed, epoch, Salt.ORDER)) if shuffle else positions


def bounds(count: int, rank: int, world: int, multiple: int = 1) -> tuple[int, int]:
    """First and last + 1 position of a rank's part of `count` samples; parts differ by at most one `multiple`."""
    blocks = -(-count // multiple)
    return min(rank * blocks // world * multiple, count), min((rank + 1) * blocks // world * multiple, count)


@dataclass(frozen=True, slots=True)
class Parts:
    """How each global batch is cut into parts where what is computed does not depend on the number of ranks (`sync.name=exact`)."""

    max_parts: int
    """Parts of a whole batch; a short one has fewer."""
    min_samples: int
    """Samples of a part, unless the batch has fewer."""

    def bounds(self, total: int, multiple: int = 1) -> list[tuple[int, int]]:
        """First and last + 1 position of each part of a batch of `total` samples: a function of these numbers alone.

        Args:
            multiple: parts are cut in blocks of so many samples; the last part has the rest.
        """
        number = max(1, min(self.max_parts, total // max(self.min_samples, multiple)))
        return [bounds(total, part, number, multiple) for part in range(number)]


def check_division(batch: int, world: int, multiple: int, uneven: str) -> None:
    """Raises `UserError` where the ranks cannot share a global batch as `uneven` says."""
    if uneven != "weight" and batch % (world * multiple):
        share = f"{world} ranks" + (f" in blocks of {multiple} (ghost batch norm)" if multiple > 1 else "")
        below = batch // (world * multiple) * world * multiple
        nearest = " or ".join(str(size) for size in (below, below + world * multiple) if size)
        raise UserError(
            f'a global batch of {batch} cannot be divided among {share}: make it {nearest}, or choose uneven="weight"'
        )
    if batch < world:
        raise UserError(f"a global batch of {batch} leaves some of {world} ranks without a sample: make it larger")
