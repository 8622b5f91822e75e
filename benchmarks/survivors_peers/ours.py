"""python ours.py RUN_DIR: the job as a script on a Session, below `launch --live`, `launch --max-restarts` or torchrun."""

from __future__ import annotations

import sys

import torch.nn.functional as F
from job import BATCH, CHECKPOINT_STEPS, Samples, Told, network, optimizer

from lockstep import Session

told = Told()
SETTINGS = ["sync.name=exact", "sync.options.parts=8", f"checkpoint.every_steps={CHECKPOINT_STEPS}"]
with Session(sys.argv[1], *SETTINGS) as run:
    model = run.replicate(network())
    run.optimizer(optimizer)
    for _ in run.epochs(1):
        for x, y, _ids in run.batches(Samples(), BATCH, workers=1):
            told.ready()
            run.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            told.say("step", step=run.steps, size=run.size)
    told.end(model)
