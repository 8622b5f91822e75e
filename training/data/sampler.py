"""Lockstep's data order for a `DataLoader` of your own, as a torch sampler.

    sampler = OrderSampler(len(dataset), batch_size=64)       # rank and world size from torch.distributed
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    sampler.set_epoch(epoch, step)                            # each epoch; `step` where a resumed run goes on within one

The samples of every global batch are those that `training run` trains with the same seed, at every world size, and a
seek costs nothing. Where torch's `DistributedSampler` deals samples out one by one, a rank here takes its contiguous part
of each global batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from lockstep.training.data import order


class OrderSampler(Sampler[int]):
    """The sample ids of one rank, epoch after epoch.

    Args:
        count: samples in the data set.
        batch_size: samples a rank takes a step, as in the `DataLoader`.
        rank: this process's rank and the number of ranks; from the process group, or 0 of 1, where not given.
        seed: of the order; the same on every rank.
        shuffle: a new permutation each epoch, or the data set's own order.
        uneven: what an epoch's last global batch does where it is short: `drop` leaves it out, `pad` fills it up from the
            epoch's start, `weight` gives the ranks unequal parts – then ranks may have unequal numbers of batches, which
            DistributedDataParallel bears only under `join()`.

    Raises:
        lockstep.training.contract.UserError: the data set is too small for one step.
    """

    def __init__(
        self, count: int, batch_size: int, *, rank: int | None = None, world_size: int | None = None, seed: int = 0,
        shuffle: bool = True, uneven: str = "drop",
    ) -> None:  # fmt: skip
        joined = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if joined else 1
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be in [0, {self.world_size}), got {self.rank}")
        if batch_size < 1 or uneven not in ("drop", "pad", "weight"):
            raise ValueError(
                f"batch_size must be at least 1 and uneven drop | pad | weight, got {batch_size} and {uneven!r}"
            )
        self.count, self.seed, self.shuffle, self.uneven = count, seed, shuffle, uneven
        self.global_batch = batch_size * self.world_size
        self.steps = order.steps_per_epoch(count, self.global_batch, uneven)
        self.epoch = self.first_step = 0

    def set_epoch(self, epoch: int, step: int = 0) -> None:
        """The next pass is epoch `epoch`, from its global batch `step` on."""
        self.epoch, self.first_step = epoch, step

    def step_ids(self, step: int) -> torch.Tensor:
        """This rank's ids (int64) of one global batch of the epoch."""
        global_ids = order.global_ids(
            self.count, self.seed, self.epoch, step, self.global_batch, self.uneven, self.shuffle
        )  # fmt: skip
        return order.part(global_ids, self.rank, self.world_size)

    def __iter__(self) -> Iterator[int]:
        for step in range(self.first_step, self.steps):
            yield from self.step_ids(step).tolist()

    def __len__(self) -> int:
        left = self.steps - self.first_step
        if left <= 0:
            return 0
        return (left - 1) * (self.global_batch // self.world_size) + len(self.step_ids(self.steps - 1))
