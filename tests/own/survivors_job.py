"""python tests/own/survivors_job.py RUN_DIR KIND [NAME=VALUE …]: a full run under sync.name=exact, with an event `weights` a step.

KIND: `net` (loader processes, transforms that draw, batch norm, dropout, an average, a schedule, an evaluation each epoch). `gan`: two
models that step in turn. `float16`: a loss scale that overflows at first. `part`: every rank draws the whole batch, and takes its part.
`thrown`: a step that is thrown away. `twice`: two Sessions. `summed`, `changed`, `grouped`, `of_rank`: runs that cannot continue.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from lockstep import Session
from tests.processes import poll
from tests.sync.exact_job import SETTINGS as EXACT
from tests.sync.exact_job import float16, gan

SETTINGS = [*EXACT, "checkpoint.every_steps=4", "checkpoint.keep_best=true"]


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(250, 8, generator=generator), torch.randint(0, 3, (250,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + 0.1 * torch.randn(8), self.y[index]


def net(run: Session) -> None:
    train, test = Noisy(), TensorDataset(Noisy().x + 0.05, Noisy().y)
    layers = nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3)
    model = run.replicate(nn.Sequential(*layers))
    optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    run.average(0.9)
    run.keep(schedule=schedule)

    def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        return F.cross_entropy(logits, y), {"right": (logits.argmax(1) == y).sum()}

    for _ in run.epochs(4 * run.config["times"]):
        for x, y in run.batches(train, 16, uneven="weight", workers=1):
            run.step(loss, x, y, clip=0.5)
            schedule.step()
            run.values["loss"] = run.loss()
        network = run.for_evaluation()

        def scores(x: torch.Tensor, y: torch.Tensor, network: nn.Module = network) -> dict[str, torch.Tensor]:
            logits = network(x)
            loss = F.cross_entropy(logits, y, reduction="sum")
            return {"test_loss": loss, "accuracy": (logits.argmax(1) == y).sum()}

        run.log(**run.evaluate(scores, test, 16))


def part(run: Session) -> None:
    model = run.replicate(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    for _ in run.epochs(2 * run.config["times"]):
        for step in run.iterate(range(40)):
            whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
            x, y = run.part(whole), run.part(whole.sum(1, keepdim=True))
            run.step(lambda x, y: F.mse_loss(model(x), y), x, y)


def paced(run: Session, *words: Any, **named: Any) -> Any:
    """A slow step, so that a replacement arrives on any busy machine. Each step is slow while a file `slow` is next to RUN_DIR."""
    if run.config["joins"] and run.steps > 20 and '"rank_joined"' not in (run.run_dir / "events.jsonl").read_text():
        time.sleep(1)
    if run.run_dir.with_name("slow").exists():
        time.sleep(0.6)
    return STEP(run, *words, **named)


STEP, Session.step = Session.step, paced  # type: ignore[method-assign]


def thrown(run: Session) -> None:
    """With `lose`, rank 2 is killed in the fourth step, after each other rank has run a part of the step."""
    data = Noisy()
    model = run.replicate(
        nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    )
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    run.average(0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    run.keep(scaler=scaler)
    number, calls, there = run.rank, 0, Path(sys.argv[1]).parent

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        if run.steps == 3 and run.config["lose"]:
            calls += 1
            if number != 2 and calls == 2:
                (there / f"rank-{number}").touch()
            if number == 2:
                poll(lambda: all((there / f"rank-{rank}").exists() for rank in (0, 1)), 60, "the others in the step")
                os.kill(os.getpid(), signal.SIGKILL)
        drawn = torch.rand(()) + random.random() + np.random.random()
        with torch.autocast("cpu", torch.float16):
            return drawn * F.cross_entropy(model(x).float(), y)

    for _ in run.epochs(1):
        for x, y in run.batches(data, 16, uneven="weight", workers=1):
            run.step(loss, x, y, scaler=scaler, clip=0.5)


def lose_one(run: Session) -> None:
    """A rank of the first start is killed, once 9 steps are done."""
    if run.steps == 9 and run.rank == run.config["victim"] and not run.resumed:
        os.kill(os.getpid(), signal.SIGKILL)


def small(run: Session) -> nn.Module:
    model = run.replicate(nn.Linear(8, 1))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    return model


def summed(run: Session) -> None:
    """Sums at the end of the epoch the measurements of each rank's own samples."""
    model, data = small(run), Noisy()
    for _ in run.epochs(2):
        seen = 0
        for x, _ in run.batches(data, 16):
            run.step(lambda x: model(x).square().mean(), x)
            lose_one(run)
            seen += len(x)
        run.log(seen=run.sum(seen)[0])


def twice(folder: str, *words: str) -> None:
    """Two runs, one after the other. In one of them, `lose`, rank 2 is killed."""
    data = Noisy()
    for name in ("one", "two"):
        with Session(f"{folder}/{name}", *SETTINGS, *words, config={"lose": "", "joins": False, "victim": 2}) as run:
            model = small(run)
            for _ in run.epochs(1):
                for x, _ in run.batches(data, 16):
                    run.step(lambda x, model=model: model(x).square().mean(), x)
                    if run.config["lose"] == name:
                        lose_one(run)


def changed(run: Session) -> None:
    """The script changes the batch before the step."""
    model, data = small(run), Noisy()
    for _ in run.epochs(2):
        for x, _ in run.batches(data, 16):
            run.step(lambda x: lose_one(run) or model(x).square().mean(), x * 2)


def grouped(run: Session) -> None:
    """The script makes a process group."""
    model, data, group = small(run), Noisy(), dist.new_group() if run.size > 1 else None
    for _ in run.epochs(1):
        for x, _ in run.batches(data, 16):
            run.step(lambda x: lose_one(run) or model(x).square().mean(), x)
            if group is not None:
                dist.all_reduce(torch.ones(1), group=group)


def of_rank(run: Session) -> None:
    small(run)
    run.keep_of_rank({"loader": torch.optim.SGD([torch.zeros(1)], lr=0.1)})


if __name__ == "__main__":
    run_dir, kind, *words = sys.argv[1:]
    if kind == "twice":
        twice(run_dir, *words)
        sys.exit()
    kinds = {
        "net": net,
        "gan": lambda run: gan(run, 16 * run.config["times"]),
        "float16": lambda run: float16(run, 16 * run.config["times"]),
        "part": part,
        "thrown": thrown,
        "summed": summed,
        "changed": changed,
        "grouped": grouped,
        "of_rank": of_rank,
    }
    with Session(
        run_dir,
        *SETTINGS,
        *words,
        config={"kind": kind, "times": 1, "joins": False, "lose": False, "victim": 2},
    ) as run:
        kinds[kind](run)
