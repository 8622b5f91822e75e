"""python tests/own/loop.py RUN_DIR KIND [NAME=VALUE …]: three epochs over 190 noisy images, with a scheduler and an average.

KIND is `batches` (Lockstep's order; LOOP_WORKERS processes load) or `loader` (torch's DataLoader over a shuffled dataset).
Or it is `part` (a permutation that the script draws itself), `unequal` (the same, of which rank 0 of two takes 30 of each 41 samples) or
`cursor` (a loader that saves its position).
LOOP_EXACT=1: float64, no noise, dropout or batch statistics. LOOP_BATCH: samples of all ranks together a step.
LOOP_HARD=1: micro-batches, clipping and a second optimizer, too.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lockstep import Session
from tests.nets import Dying, DyingPlain
from tests.product import SGD

EXACT = os.environ.get("LOOP_EXACT") == "1"
BATCH = int(os.environ.get("LOOP_BATCH", "24"))
WORKERS = int(os.environ.get("LOOP_WORKERS", "0"))
HARD = os.environ.get("LOOP_HARD") == "1"
COUNT = 190


class Noisy(Dataset):  # type: ignore[type-arg]
    """Each sample draws from the generators of torch, numpy and Python."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        dtype = torch.get_default_dtype()
        self.images = torch.randn(COUNT, 3, 8, 8, generator=generator, dtype=dtype)
        self.labels = torch.randint(0, 10, (COUNT,), generator=generator)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.0 if EXACT else torch.randn(()).item() + float(np.random.rand()) + random.random()
        return self.images[index] + 0.1 * noise, self.labels[index]


class Resumable:
    """Draws this rank's batches epoch by epoch, and counts the batches given in the epoch."""

    def __init__(self, data: Noisy, size: int, rank: int, ranks: int) -> None:
        self.data, self.size, self.rank, self.ranks = data, size, rank, ranks
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.epoch))
        own = order[: COUNT // self.ranks * self.ranks].view(self.ranks, -1)[self.rank].split(self.size)
        while self.given < len(own):
            self.given += 1
            images, labels = zip(*(self.data[int(index)] for index in own[self.given - 1]), strict=True)
            yield torch.stack(images), torch.stack(labels)
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Two(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.bias = body, nn.Parameter(torch.zeros(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.bias


def main(run: Session, kind: str) -> None:
    torch.manual_seed(3)
    data = Noisy()
    body = (DyingPlain if EXACT else Dying)()
    network = Two(body) if HARD else body
    model = run.replicate(network, example=data.images[:2])
    if HARD:
        optimizer = run.optimizer(lambda _: SGD(network.body.parameters(), lr=0.05, momentum=0.9), "body")
        run.optimizer(lambda _: torch.optim.Adam([network.bias], lr=0.01), "bias")
    else:
        optimizer = run.optimizer(lambda parameters: SGD(parameters, lr=0.05, momentum=0.9))
    run.average(0.9, every=3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
    own = Resumable(data, BATCH // run.size, run.rank, run.size)
    order, noise = np.random.Generator(np.random.MT19937(7)), torch.Generator().manual_seed(run.rank)
    if kind == "loader":
        run.keep(schedule=schedule, order=order, noise=noise)
    elif kind == "cursor":
        run.keep_of_rank({"loader": own}, schedule=schedule)
    else:
        run.keep(schedule=schedule)
    run.values.setdefault("seen", np.zeros(10, dtype=np.int64))
    sampler = DistributedSampler(data, run.size, run.rank, shuffle=True)
    loader = DataLoader(data, BATCH // run.size, sampler=sampler, num_workers=WORKERS)
    for epoch in run.epochs(3):
        if kind == "batches":
            batches = run.batches(data, BATCH, uneven="weight", workers=WORKERS)
        elif kind == "loader":
            sampler.set_epoch(epoch + int(order.integers(1000)))
            batches = run.iterate(loader)
        elif kind == "cursor":
            batches = run.iterate(own)
        else:
            batches = run.iterate(torch.randperm(COUNT).split(BATCH))
        for batch in batches:
            if kind == "loader":
                batch = batch[0] + 0.01 * torch.randn(batch[0].shape, generator=noise), batch[1]
            if kind in ("part", "unequal"):
                cut = 30 * len(batch) // 41
                mine = run.part(batch) if kind == "part" else batch[:cut] if run.leader else batch[cut:]
                batch = data.images[mine], data.labels[mine]
            images, labels = batch
            if HARD:
                for x, y in run.accumulate(zip(images.chunk(2), labels.chunk(2), strict=True)):
                    run.backward(F.cross_entropy(model(x), y), samples=len(y))
                run.update(clip=1.0)
            else:
                samples = len(labels) if kind in ("loader", "cursor", "unequal") else None
                run.step(F.cross_entropy(model(images), labels), samples=samples)
            schedule.step()
            run.values["seen"][int(labels[0])] += run.leader
        average, right, drawn, was = run.for_evaluation(), 0, 0.0, network.training
        network.eval()
        for images, labels in zip(data.images.split(50), data.labels.split(50), strict=True):
            with torch.no_grad():
                right += int((average(images).argmax(1) == labels).sum())
            drawn += random.random()  # as test-time augmentation does
            run.boundary()
        network.train(was)
        run.log(accuracy=right / COUNT, drawn=drawn)
    print("the script goes on after the run", flush=True)


if __name__ == "__main__":
    if EXACT:
        torch.set_default_dtype(torch.float64)
    run_dir, kind, *words = sys.argv[1:]
    with Session(run_dir, *words, config={"kind": kind, "batch": BATCH}) as run:
        main(run, kind)
    if run.leader and "LOOP_TELL" in os.environ:
        print(json.dumps({"steps": run.steps}))
