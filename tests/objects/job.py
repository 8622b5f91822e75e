"""python tests/objects/job.py RUN_DIR URL [NAME=VALUE …]: 12 steps, a checkpoint every three, a score that is best at step 6.

STEPS: number of steps; WAIT: file to wait for after step 9; FRESH: start over; SERVER: port of the server.
PACE: seconds to wait until a checkpoint has arrived at the server, before each epoch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from lockstep import Session
from tests.objects.server import read
from tests.processes import poll

run_dir, url, *words = sys.argv[1:]


def has_arrived(step: int) -> bool:
    with contextlib.suppress(urllib.error.HTTPError):  # there is no head yet
        head = json.loads(read(int(os.environ["SERVER"]), f"{url.removeprefix('s3://bucket/')}/head"))
        return any(entry["step"] >= step for entry in head["checkpoints"])
    return False


SETTINGS = [
    "sync.name=exact",
    "sync.options.parts=4",
    "checkpoint.every_steps=3",
    "checkpoint.keep=1",
    "metrics.enabled=false",
]
FRESH = os.environ.get("FRESH", "")
with Session(run_dir, *SETTINGS, f"checkpoint.to={url}", *words, fresh=FRESH == "1" or FRESH or False) as run:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)))
    run.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
    for _ in run.epochs(int(os.environ.get("STEPS", "12")) // 3):
        if run.steps and run.rank == 0 and (pace := float(os.environ.get("PACE", "0"))):
            with contextlib.suppress(AssertionError):
                poll(lambda: has_arrived(run.steps), pace)
        for (batch,) in run.batches(torch.utils.data.TensorDataset(x), 16):
            run.step(lambda batch: model(batch).square().mean(), batch)
        run.log(accuracy=1.0 - abs(run.steps - 6) / 100)
        if run.steps == 9 and "WAIT" in os.environ:
            poll(Path(os.environ["WAIT"]).exists, 200, "the other attempt")
