"""Reads the means of all ranks and the gradient's norm every `log.every` steps. Neither the GPU nor a rank waits.

    reading.start(losses, names, norm, step=50)     # starts a sum over the ranks, and a copy to the host
    for values in reading.poll(): …        # {"step": 50, "train_loss": …, "grad_norm": …}, once the copy has arrived

Every rank calls them at the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist

from ..parallel.world import World


@dataclass(slots=True)
class _Copy:
    """Numbers that are being copied to the host."""

    sums: torch.Tensor
    """float64 [2 + names]: the sum of losses, the number of samples, and other sums of the epoch so far."""
    names: Sequence[str]
    norm: torch.Tensor | None
    summed: dist.Work | None
    """The sum over the ranks; None where it is that already."""
    arrived: torch.cuda.Event | None
    """The end of the copy; None on a CPU, where nothing is copied."""
    first_of_epoch: bool
    values: dict[str, Any]
    """Values of `start`, returned with the numbers."""

    def is_here(self) -> bool:
        if self.arrived is not None:
            return bool(self.arrived.query())
        return self.summed is None or self.summed.is_completed()

    def wait(self) -> None:
        """Raises `RuntimeError` where the sum failed on the way."""
        if self.arrived is not None:
            self.arrived.synchronize()
        elif self.summed is not None:
            self.summed.wait()


class LossReader:
    """Turns the epoch's running sums into the means since the last reading, over the samples of all ranks.

    Args:
        losses: float64 [2 + names], this rank's sums in the current epoch (`TrainState.losses`); read once here, because a resumed
            run begins in the middle of an epoch. Collective.
        of_all: they are those of all ranks already.
    """

    def __init__(self, losses: torch.Tensor, world: World, of_all: bool = False) -> None:
        self._world, self._sums = world, world.size > 1 and not of_all
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        before = losses.cpu().clone()
        if self._sums:
            dist.all_reduce(before)
        self._before: list[float] = before.tolist()
        self._first = False
        self._copies: deque[_Copy] = deque()

    def new_epoch(self) -> None:
        """The sums start at zero again."""
        self._first = True

    @property
    def within_epoch(self) -> bool:
        """Whether the epoch had samples at the last reading. The same on all ranks."""
        return not self._first and self._before[1] > 0

    def start(
        self, losses: torch.Tensor, names: Sequence[str], norm: torch.Tensor | None, **values: Any
    ) -> None:  # fmt: skip
        """Starts to read the sums and the norm, as they will be when the work queued so far is done. Collective.

        Args:
            losses: as in the constructor, of the current epoch.
            names: of its sums but the first two.
            norm: of the gradient, a scalar; None where it was not computed.
            values: come back from `poll` with what was read.
        """
        sums = losses.clone()
        norm = None if norm is None else norm.detach().clone()
        summed = dist.all_reduce(sums, async_op=True) if self._sums else None
        arrived = None
        if self._stream is not None:  # a second stream waits for the other ranks; the training stream does not
            self._stream.wait_stream(torch.cuda.current_stream(self._world.device))
            with torch.cuda.stream(self._stream):
                if summed is not None:
                    summed.wait()
                sums, norm = _to_host(sums), None if norm is None else _to_host(norm)
                arrived = torch.cuda.Event()
                arrived.record()
        self._copies.append(_Copy(sums, names, norm, summed, arrived, self._first, values))
        self._first = False

    def poll(self, wait: bool = False) -> Iterator[dict[str, Any]]:
        """The readings that have arrived, in order; with `wait`, all that `start` has started.

        Yields the `values` of `start` with `train_loss` and `train_NAME`, the means over all ranks' samples since the last reading
        (None where there were none), and `grad_norm`.
        """
        while self._copies and (wait or self._copies[0].is_here()):
            copy = self._copies.popleft()
            copy.wait()
            before = [] if copy.first_of_epoch else self._before
            self._before = copy.sums.tolist()
            # A start may return fewer names than the one before it.
            since = [now - then for now, then in zip(self._before, chain(before, repeat(0.0)))]
            yield {
                **copy.values,
                **means(copy.names, since),
                "grad_norm": None if copy.norm is None else float(copy.norm),
            }


def means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float | None]:
    """By the names of events: `train_loss`, and `train_NAME` of each other sum."""
    loss, samples, *others = sums
    return {
        f"train_{name}": mean_loss(total, samples)
        for name, total in zip(("loss", *names), (loss, *others), strict=True)
    }


def mean_loss(losses: float, samples: float) -> float | None:
    """Returns the mean of a sum of losses; None without samples: 0 would look like a perfect loss."""
    return losses / samples if samples > 0 else None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(torch.cuda.current_stream(tensor.device))  # its memory is that of the stream that trains
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
