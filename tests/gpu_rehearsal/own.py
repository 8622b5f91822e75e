"""own.py RUN_DIR NAME=VALUE …: a user's loop on a `Session`, like examples/own_loop.py.

Lockstep's order, from pinned memory; float16 with a `GradScaler` that first overflows, micro-batches and clipping.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from lockstep import Session
from tests.nets import DyingPlain

SAMPLES, BATCH, EPOCHS = 96, 24, 2
SCALE = 2.0**19
"""A gradient of the logits times this is beyond float16."""


def main(run: Session) -> None:
    torch.manual_seed(3)
    images, labels = torch.randn(SAMPLES, 3, 8, 8), torch.randint(10, (SAMPLES,))
    model = run.replicate(DyingPlain(), example=images[:2].to(run.device))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    run.average(0.9, every=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=SCALE, growth_interval=2)
    run.keep(schedule=schedule, scaler=scaler)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(TensorDataset(images, labels), BATCH, workers=1):
            for x, y in run.accumulate(zip(*(part.chunk(2) for part in batch), strict=True)):
                with torch.autocast(run.device.type, torch.float16):
                    logits = model(x)
                run.backward(F.cross_entropy(logits.float(), y), samples=len(y), scaler=scaler)
            run.update(clip=1.0, scaler=scaler)
            schedule.step()
        average, right = run.for_evaluation(), 0
        for x, y in zip(images.split(48), labels.split(48), strict=True):
            with torch.no_grad():
                right += int((average(x.to(run.device)).argmax(1).cpu() == y).sum())
            run.boundary()
        run.log(accuracy=right / SAMPLES)
    print(f"scale {scaler.get_scale():.0f}", flush=True)


if __name__ == "__main__":
    run_dir, *words = sys.argv[1:]
    with Session(run_dir, *words) as run:
        main(run)
