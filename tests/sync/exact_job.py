"""python tests/sync/exact_job.py RUN_DIR KIND [NAME=VALUE …]: two epochs under sync.name=exact, with an event `weights` a step.

KIND: `transformer` (dropout, clipping, AdamW, 117 sequences in batches of 19). `gan`: two models and optimizers, batch norm, noise that
the function draws. `float16`: a loss scale that overflows at first. EXACT_END=STEP:SIGNAL:RANK: that rank sends itself the signal
after the step, once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Session

SETTINGS = ["sync.name=exact", "sync.options.parts=8", "log.weights_every=1"]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(
            self.encoder(self.embedding(x), mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))
        )


def end(run: Session) -> None:
    step, name, rank = os.environ.get("EXACT_END", "0:TERM:0").split(":")
    if run.steps == int(step) and run.rank == int(rank) and not run.resumed:
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))


def transformer(run: Session) -> None:
    data = TensorDataset(torch.randint(0, 17, (117, 12), generator=torch.Generator().manual_seed(1)))
    model = run.replicate(Transformer())
    optimizer = run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    run.keep(schedule=schedule)
    for _ in run.epochs(2):
        for (x,) in run.batches(data, 19, uneven="weight"):
            run.step(lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()), x, clip=0.05)
            schedule.step(run.loss())
            end(run)


def gan(run: Session, epochs: int = 2) -> None:
    data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(1)) + 3)
    g = run.replicate(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)), name="g")
    d = run.replicate(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1)), name="d")
    of_g = run.optimizer(lambda parameters: torch.optim.Adam(parameters, lr=2e-3), name="of_g", model=g)
    of_d = run.optimizer(lambda parameters: torch.optim.Adam(parameters, lr=2e-3), name="of_d", model=d)

    def judged(x: torch.Tensor) -> torch.Tensor:
        fake = g(torch.randn(len(x), 4)).detach()
        return F.softplus(-d(x)).mean() + F.softplus(d(fake)).mean()

    for _ in run.epochs(epochs):
        for (x,) in run.batches(data, 32):
            run.step(judged, x, optimizer=of_d)
            run.step(lambda x: F.softplus(-d(g(torch.randn(len(x), 4)))).mean(), x, optimizer=of_g)
            end(run)


def float16(run: Session, epochs: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(90, 8, generator=generator), torch.randint(0, 3, (90,), generator=generator))
    model = run.replicate(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    run.average(0.9, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    run.keep(scaler=scaler)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return F.cross_entropy(model(x).float(), y)

    for _ in run.epochs(epochs):
        for x, y in run.batches(data, 20, uneven="weight"):
            run.step(loss, x, y, scaler=scaler)
            end(run)


if __name__ == "__main__":
    run_dir, kind, *words = sys.argv[1:]
    with Session(run_dir, *SETTINGS, "checkpoint.every_steps=2", *words, config={"kind": kind}) as run:
        {"transformer": transformer, "gan": gan, "float16": float16}[kind](run)
