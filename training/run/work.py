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

    def of(self, batch: tuple[Any, ...]) -> Work:
        """The same over other tensors."""
        return Work(self.compute, batch, self.samples, self.total, self.divisor, self.weight, self.parts)


class Total:
    """Samples of all ranks in a step. Where the loader does not know them, they are summed while the step computes."""

    def __init__(self, work: Work) -> None:
        self._known, self._summed = work.total, None
        if work.total is None:
            self._sum = torch.tensor(work.samples)
            self._summed = dist.all_reduce(self._sum, async_op=True)

    @property
    def value(self) -> int:
        """Waits for the sum. Collective: every rank asks."""
        if self._known is None:
            if self._summed is not None:
                self._summed.wait()
            self._known = int(self._sum)
        return self._known

    @staticmethod
    def of(samples: int) -> int:
        """The sum over the ranks. Collective."""
        total = torch.tensor(samples)
        dist.all_reduce(total)
        return int(total)


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
