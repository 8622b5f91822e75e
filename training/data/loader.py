"""A rank's batches. The global batch comes from `order`; this gives the rank its part, on its device.

Where the images fit, they stay on the device as uint8 and a batch is a list of row numbers. Otherwise a thread gathers
the next batches from the mapped files into pinned memory while the device computes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lockstep.training.config import Config
from lockstep.training.contract import UserError
from lockstep.training.data import order
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.parallel.world import World


@dataclass(frozen=True, slots=True)
class Batch:
    """A rank's part of one global batch. Its samples are `images[rows]`: uint8 images or float32 vectors.

    `total` is the size of the global batch, the divisor of a mean loss. A rank whose part is empty gets one sample
    with `weight` 0, so that it takes part in every collective and adds nothing. With `uneven=mean`, `weight` makes the
    gradient the mean of the ranks' means.
    """

    images: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor
    total: int
    weight: float = 1.0

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same batch with every tensor replaced."""
        images, rows, ids, labels = (function(t) for t in (self.images, self.rows, self.ids, self.labels))
        return Batch(images, rows, ids, labels, self.total, self.weight)


class Loader:
    """The training batches of one rank.

    Args:
        global_batch: samples of all ranks together a step.
        multiple: a rank's part comes in blocks of this many (32 for ghost batch norm).
        verified: the ranks of the node have verified the files already.
    """

    def __init__(
        self, config: Config, world: World, manifest: Manifest, global_batch: int, multiple: int, verified: bool = False
    ) -> None:
        data = config.data
        order.check_division(global_batch, world.size, multiple, config.uneven)
        self.config, self.world, self.batch, self.multiple = config, world, global_batch, multiple
        self.total = manifest.count("train")
        self.slices = _slices(manifest, world.size) if data.shuffle == "shard" else [(0, self.total)]
        low, high = self.slices[world.rank if data.shuffle == "shard" else 0]
        self.steps_per_epoch = self._steps()
        self.samples = Samples.open(manifest, "train", low, high, data.verify and not verified)
        self.resident = fits(self.samples, world) if data.resident == "auto" else data.resident == "always"
        if self.resident:
            images, labels = self.samples.all()
            self._images, self._labels = images.to(world.device), labels.to(world.device)

    def _steps(self) -> int:
        if self.config.data.shuffle != "shard":
            return order.steps_per_epoch(self.total, self.batch, self.config.uneven)
        counts = [
            order.steps_per_epoch(high - low, max(self._part_size(rank), 1), self.config.uneven)
            for rank, (low, high) in enumerate(self.slices)
        ]
        return min(counts) if self.config.uneven == "drop" else max(counts)

    def describe_slices(self) -> list[dict[str, int]]:
        """With `shuffle: shard`, each rank's own part: {rank, samples, batch_size, batches, left_out} an epoch; else empty."""
        if self.config.data.shuffle != "shard":
            return []
        slices = []
        for rank, (low, high) in enumerate(self.slices):
            size, steps = self._part_size(rank), self.steps_per_epoch
            own_batches = -(-(high - low) // max(size, 1))
            batches = steps if self.config.uneven == "pad" else min(steps, own_batches)
            left_out = max(0, high - low - steps * size)
            slices.append(
                {"rank": rank, "samples": high - low, "batch_size": size, "batches": batches, "left_out": left_out}
            )
        return slices

    def describe_unequal_work(self) -> str | None:
        """A sentence where one rank has at least half as much again to compute as another: all wait for it in every step."""
        sizes = [self._part_size(rank) for rank in range(self.world.size)]
        if 2 * max(sizes) < 3 * min(sizes):
            return None
        share = self.multiple * self.world.size
        below = self.batch // share * share
        equal = " or ".join(f"global_batch_size={size}" for size in (below, below + share) if size)
        blocks = f", in blocks of {self.multiple} (ghost batch norm)" if self.multiple > 1 else ""
        return (
            f"Of each {self.batch} samples a rank computes {min(sizes)} to {max(sizes)}{blocks}, and waits for the rank that "
            f"has most: {equal} gives equal parts"
        )

    def _part_size(self, rank: int) -> int:
        low, high = order.bounds(self.batch, rank, self.world.size, self.multiple)
        return high - low

    def ids(self, epoch: int, step: int) -> tuple[torch.Tensor, list[int]]:
        """(the rank's global sample ids, the number of samples of each rank) of one step of an epoch."""
        config, shuffle = self.config, self.config.data.shuffle != "none"
        if config.data.shuffle != "shard":
            global_ids = order.global_ids(
                self.total, config.seed, epoch, step, self.batch, config.uneven, shuffle
            )  # fmt: skip
            # With `mean` the ranks take whole batches in turn, as a loop over `i % world_size == rank` does.
            divided = self.batch if config.uneven == "mean" else len(global_ids)
            ranges = [order.bounds(divided, rank, self.world.size, self.multiple) for rank in range(self.world.size)]
            low, high = ranges[self.world.rank]
            return global_ids[low:high], [len(global_ids[a:b]) for a, b in ranges]
        parts = []
        for rank, (low, high) in enumerate(self.slices):
            size = self._part_size(rank)
            if rank == self.world.rank:
                seed = order.key(config.seed, rank, 8)
                rank_ids = low + order.global_ids(high - low, seed, epoch, step, size, config.uneven)
            left = high - low - step * size
            parts.append(size if config.uneven == "pad" else max(0, min(size, left)))
        return rank_ids, parts

    def _share(self, epoch: int, step: int) -> tuple[torch.Tensor, int, float]:
        """(the rank's ids, the size of the global batch, the weight of the rank's samples)."""
        ids, parts = self.ids(epoch, step)
        total, taking_part = sum(parts), sum(part > 0 for part in parts)
        if not len(ids):
            return torch.tensor([self.samples.low]), total, 0.0
        return ids, total, total / (taking_part * len(ids)) if self.config.uneven == "mean" else 1.0

    def host_batch(self, epoch: int, step: int) -> Batch:
        """The batch in CPU memory, from the mapped files."""
        ids, total, weight = self._share(epoch, step)
        images, labels = self.samples.take(ids)
        return Batch(images, torch.arange(len(ids)), ids, labels, total, weight)

    def resident_batch(self, epoch: int, step: int) -> Batch:
        """The batch as rows of the images that stay on the device."""
        ids, total, weight = self._share(epoch, step)
        ids = ids.to(self.world.device, non_blocking=True)
        rows = ids - self.samples.low
        return Batch(self._images, rows, ids, self._labels[rows], total, weight)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `first_step` on. Close the iterator to end its thread early."""
        steps = range(first_step, self.steps_per_epoch)
        if self.resident:
            return (self.resident_batch(epoch, step) for step in steps)
        return self._prefetched(epoch, steps)

    def _prefetched(self, epoch: int, steps: range) -> Iterator[Batch]:
        device, pinned = self.world.device, self.world.device.type == "cuda"
        ready: queue.Queue[Batch | Exception] = queue.Queue(self.config.data.prefetch)
        stop = threading.Event()

        def put(item: Batch | Exception) -> bool:
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def work() -> None:
            try:
                for step in steps:
                    batch = self.host_batch(epoch, step)
                    if pinned:
                        batch = batch.map(torch.Tensor.pin_memory)
                    if not put(batch):
                        return
            except Exception as error:  # noqa: BLE001 - raised again by the consumer
                put(error)

        worker = threading.Thread(target=work, name="loader", daemon=True)
        worker.start()
        try:
            for _ in steps:
                item = ready.get()
                if isinstance(item, Exception):
                    raise item
                if pinned:
                    item = item.map(lambda tensor: tensor.to(device, non_blocking=True))
                yield item
        finally:
            stop.set()
            worker.join()


def fits(samples: Samples, world: World) -> bool:
    """Whether the samples take at most a quarter of the device's free memory, or of the rank's share of the host's."""
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.local_size
    return samples.num_bytes <= free // 4


def _slices(manifest: Manifest, world_size: int) -> list[tuple[int, int]]:
    """The id range of each rank's own files."""
    shards = manifest.splits["train"]
    if len(shards) < world_size:
        raise UserError(
            f"shuffle=shard needs a file for each of {world_size} ranks, but there are {len(shards)}: "
            f"set data.num_shards={world_size}"
        )
    starts = [sum(shard.count for shard in shards[:number]) for number in range(len(shards) + 1)]
    ranges = [order.bounds(len(shards), rank, world_size) for rank in range(world_size)]
    return [(starts[low], starts[high]) for low, high in ranges]
