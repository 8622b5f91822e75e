"""python -m tests.gpu_rehearsal.own RUN_DIR NAME=VALUE …: a loop of one's own on a `Session`, as examples/own_loop.py is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from lockstep import Session
from tests.gpu_rehearsal.emulation import Emulation
from tests.nets import DyingPlain
from training.__main__ import leave

SAMPLES, BATCH, EPOCHS = 96, 24, 2


def main(run: Session) -> None:
    torch.manual_seed(3)
    images, labels = torch.randn(SAMPLES, 3, 8, 8), torch.randint(10, (SAMPLES,))
    model = run.replicate(DyingPlain(), example=images[:2].to(run.device))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    run.average(0.9, every=3)
    run.keep(schedule=(schedule := torch.optim.lr_scheduler.StepLR(optimizer, 3)))
    for _ in run.epochs(EPOCHS):
        for batch in run.iterate(torch.randperm(SAMPLES).split(BATCH)):
            own = run.part(batch)
            run.step(F.cross_entropy(model(images[own].to(run.device)), labels[own].to(run.device)))
            schedule.step()
        with torch.no_grad():
            logits = run.for_evaluation()(images.to(run.device)).cpu()
        run.log(accuracy=(logits.argmax(1) == labels).float().mean())


if __name__ == "__main__":
    emulation = Emulation()
    with emulation, Session(sys.argv[1], *sys.argv[2:]) as run:
        main(run)
    emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    leave(0)
