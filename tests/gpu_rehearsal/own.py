"""python -m tests.gpu_rehearsal.own RUN_DIR KIND NAME=VALUE …: a loop of one's own on a `Session`, as examples/own_loop.py is one.

KIND: `part` (a permutation that the script draws), `batches` (Lockstep's order, from pinned memory; float16 with a
`GradScaler` that first overflows, micro-batches and clipping).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from lockstep import Session
from tests import product
from tests.gpu_rehearsal.emulation import Emulation
from tests.nets import DyingPlain

SAMPLES, BATCH, EPOCHS = 96, 24, 2
SCALE = 2.0**19
"""A gradient of the logits times this is beyond float16."""


def main(run: Session, kind: str) -> None:
    torch.manual_seed(3)
    images, labels = torch.randn(SAMPLES, 3, 8, 8), torch.randint(10, (SAMPLES,))
    model = run.replicate(DyingPlain(), example=images[:2].to(run.device))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    run.average(0.9, every=3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=SCALE, growth_interval=2)
    run.keep(schedule=schedule, scaler=scaler)
    for _ in run.epochs(EPOCHS):
        if kind == "part":
            for batch in run.iterate(torch.randperm(SAMPLES).split(BATCH)):
                own = run.part(batch)
                run.step(F.cross_entropy(model(images[own].to(run.device)), labels[own].to(run.device)))
                schedule.step()
        else:
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
    if kind == "batches":
        print(f"scale {scaler.get_scale():.0f}", flush=True)


if __name__ == "__main__":
    run_dir, kind, *words = sys.argv[1:]
    emulation, code = Emulation(), 0
    try:
        with emulation, Session(run_dir, *words) as run:
            main(run, kind)
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        emulation.write(Path(os.environ["REHEARSAL_FOUND"]))
    product.leave(code)
