"""What one step computes: the loss of this rank's part of a batch, in micro-batches, and how many samples all ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.training.data import order
from lockstep.training.data.batches import Part

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
    most: int
    """Samples of a micro-batch, about; 0: all at once."""
    part: Part | None
    """Of the global batch; None: it is not known."""

    def micro_batches(self, low: int, high: int) -> tuple[tuple[int, int], ...]:
        """First and last + 1 sample of each micro-batch of these, of about the same size."""
        samples, multiple = high - low, self.part.multiple if self.part is not None else 1
        if not self.most or samples <= self.most:
            return ((low, high),)
        number = -(-samples // max(self.most // multiple * multiple, multiple))
        ranges = (order.bounds(samples, at, number, multiple) for at in range(number))
        return tuple((low + first, low + end) for first, end in ranges if end > first)


class Total:
    """Samples of all ranks in a step, of which this one has `samples`. Where they are not `known`, they are summed meanwhile.

    Collective.
    """

    def __init__(self, samples: int, known: int | None) -> None:
        self._known = known
        if known is None:
            self._sum = torch.tensor(samples)
            self._summed = dist.all_reduce(self._sum, async_op=True)

    @property
    def value(self) -> int:
        """Waits for the sum."""
        if self._known is None:
            if self._summed is not None:
                self._summed.wait()
            self._known = int(self._sum)
        return self._known


def checked_loss(loss: Any) -> torch.Tensor:
    """Raises `TypeError` for anything but one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"the loss is the mean over this rank's samples, one number; got {what}")
    return loss
