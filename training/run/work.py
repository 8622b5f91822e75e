"""What one step computes: the loss of this rank's part of a batch, in micro-batches, and how many samples all ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.training.data import order

Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: the loss of this rank's part."""

    compute: Compute
    batch: tuple[Any, ...]
    samples: int
    total: int | None
    """Samples of all ranks; None: not known yet."""
    divisor: float | None
    """`compute` gives a sum of losses, to be divided by this; None: their mean."""
    weight: float
    parts: tuple[tuple[int, int], ...]
    """Of the micro-batches: first and last + 1 sample; empty: the whole part at once."""


class Total:
    """Samples of all ranks in a step, of which this one has `samples`. Where they are not `known`, they are summed meanwhile.

    Collective.
    """

    def __init__(self, samples: int, known: int | None) -> None:
        self._sum = torch.tensor(samples if known is None else known)
        self._summed = dist.all_reduce(self._sum, async_op=True) if known is None else None

    @property
    def value(self) -> int:
        """Waits for the sum."""
        if self._summed is not None:
            self._summed.wait()
            self._summed = None
        return int(self._sum)


def micro_batches(samples: int, most: int, multiple: int) -> tuple[tuple[int, int], ...]:
    """First and last + 1 sample of each, of about the same size; empty where all go at once.

    Args:
        most: samples of one, about; 0: all.
        multiple: they are cut in blocks of so many.
    """
    if not most or samples <= most:
        return ()
    number = -(-samples // max(most // multiple * multiple, multiple))
    ranges = (order.bounds(samples, at, number, multiple) for at in range(number))
    return tuple((low, high) for low, high in ranges if high > low)
