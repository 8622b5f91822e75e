"""A data set shared out over the ranks for a loop of one's own: every rank sees its part of each global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from lockstep.training.data.order import bounds, global_ids, part
from lockstep.training.parallel.world import World


def torch_type(name: torch.dtype | str) -> torch.dtype:
    """`torch.float32`, which may also be given as `"float32"`. Raises `ValueError` for anything else, and names it."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be one of torch's, e.g. torch.float32 or 'float32', got {name!r}")  # noqa: TRY004
    return dtype


unequal_parts = 0
"""Batches that some `PartitionedLoader` of this process has dealt in parts of different sizes."""


class PartitionedLoader:
    """Batches (inputs, targets) of one rank's part of each global batch, on the device.

    A pass draws a new order, the same at every world size. The last batch of a pass is short where the batch size does
    not divide the data, and left out where it would leave a rank without a sample. Parts differ by at most one sample.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, world: World, device: torch.device | str | None,
        dtype: torch.dtype | str, seed: int = 0, shuffle: bool = True,
    ) -> None:  # fmt: skip
        """`batch_size` is the global one; `device` None: the rank's. Floating-point inputs become `dtype`; targets keep their type.

        Raises:
            ValueError: a rank would have no sample.
        """
        self.dataset, self.batch_size, self.world = dataset, batch_size, world
        self.device, self.dtype, self.seed, self.shuffle = device, torch_type(dtype), seed, shuffle
        self.passes = 0
        self.count = len(dataset)  # type: ignore[arg-type]
        if batch_size < world.size or self.count < world.size:
            raise ValueError(
                f"a batch of {batch_size} out of {self.count} samples leaves some of {world.size} ranks without one"
            )

    @property
    def per_rank(self) -> int:
        """Samples of this rank in a full batch."""
        low, high = bounds(self.batch_size, self.world.rank, self.world.size)
        return high - low

    def __len__(self) -> int:
        return self.count // self.batch_size + (self.count % self.batch_size >= self.world.size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        global unequal_parts
        number, self.passes = self.passes, self.passes + 1
        for step in range(len(self)):
            ids = global_ids(self.count, self.seed, number, step, self.batch_size, "weight", self.shuffle)
            unequal_parts += len(ids) % self.world.size != 0
            rank_ids = part(ids, self.world.rank, self.world.size)
            inputs, targets = default_collate([self.dataset[i] for i in rank_ids.tolist()])
            device = self.device or self.world.device
            yield inputs.to(device=device, dtype=self.dtype), targets.to(device)
