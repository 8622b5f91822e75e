"""The loss and the gradient's norm, read now and then without making the GPU wait.

reading.take(losses, norm, step=50)     # queues a copy to the host
for values in reading.ready(): …        # {"step": 50, "train_loss": …, "grad_norm": …}, once the copy has arrived
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class _Copy:
    numbers: torch.Tensor
    arrived: torch.cuda.Event | None
    first_of_epoch: bool
    has_norm: bool
    values: dict[str, Any]


class Reading:
    """Turns the epoch's running sums into the mean loss since the last reading.

    Args:
        losses: float64 [2], this rank's sum of losses and number of samples in the current epoch; read once here,
            because a resumed run begins in the middle of an epoch.
    """

    def __init__(self, losses: torch.Tensor) -> None:
        self._sum, self._count = losses.tolist()
        self._first = False
        self._copies: deque[_Copy] = deque()

    def new_epoch(self) -> None:
        """The sums start at zero again."""
        self._first = True

    def take(self, losses: torch.Tensor, norm: torch.Tensor | None, **values: Any) -> None:
        """Asks for the numbers as they stand in the device's queue; `values` come back with them."""
        both = losses if norm is None else torch.cat([losses, norm.detach().to(losses.dtype).reshape(1)])
        arrived = None
        if losses.device.type == "cuda":
            numbers = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            numbers.copy_(both, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        else:
            numbers = both.clone()
        self._copies.append(_Copy(numbers, arrived, self._first, norm is not None, values))
        self._first = False

    def ready(self) -> Iterator[dict[str, Any]]:
        """The readings that have arrived, in their order."""
        while self._copies and (self._copies[0].arrived is None or self._copies[0].arrived.query()):
            copy = self._copies.popleft()
            numbers = copy.numbers.tolist()
            before = (0.0, 0.0) if copy.first_of_epoch else (self._sum, self._count)
            self._sum, self._count = numbers[:2]
            samples = self._count - before[1]
            yield {
                **copy.values,
                "train_loss": (self._sum - before[0]) / samples if samples > 0 else None,
                "grad_norm": numbers[2] if copy.has_norm else None,
            }
