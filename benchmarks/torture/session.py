"""lockstep run … python session.py RUN: with Lockstep's Session, which saves after each epoch, and when a signal comes."""

import sys
from pathlib import Path

import job
import torch
import torch.nn.functional as F

from lockstep import Session

path = Path(sys.argv[1])
with Session(path / "run") as run:
    model = run.replicate(job.net())
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    for _ in run.epochs(job.EPOCHS):
        for x, y in run.batches(job.data(), 2 * job.BATCH):
            loss = F.cross_entropy(model(x), y)
            run.step(loss)
            job.tell(run.steps, loss)
    job.finish(model, path)
