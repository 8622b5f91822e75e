"""python tests/prometheus/held_loop.py RUN_DIR FILE: a loop of one's own, whose evaluation waits until FILE is there."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from lockstep import Session


def there(path: Path) -> bool:
    """Whether rank 0 sees the file: each rank for itself would leave the loop at a boundary of its own."""
    seen = torch.tensor([path.exists()], dtype=torch.uint8)
    torch.distributed.broadcast(seen, 0)
    return bool(seen.item())


if __name__ == "__main__":
    with Session(sys.argv[1]) as run:
        model = run.replicate(torch.nn.Linear(4, 2))
        run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for epoch in run.epochs(2):
            for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(60, 4)), 12):
                run.step(model(batch[0]).square().mean())
            run.log(wer=0.5 / (epoch + 1), accuracy=0.75)
            while epoch == 0 and not there(Path(sys.argv[2])):
                run.boundary()
                time.sleep(0.02)
