"""The training of benchmarks/failure.py: prints when each part of its start is over, and kills itself at the steps it was told.

    python failure_loop.py STEPS EVERY SECONDS KIND STEP [STEP …]

STEPS in all, of SECONDS each; a checkpoint EVERY steps (`20`) or seconds (`0.5s`), larger by FAILURE_MEGABYTES of the environment. At
each STEP, once in the life of the run, the last rank (KIND `rank`) or its launcher (`launcher`) is killed; with another KIND nothing is.
"""

# ruff: noqa: E402 - the imports are among what is measured
from __future__ import annotations

import time

BEGUN = time.time()

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from lockstep import Session
from lockstep.training.launch.handed import Handed

IMPORTED = time.time()


def main(steps: int, every: str, seconds: float, kind: str, fates: list[int]) -> None:
    run_dir = Path(Handed.take(dict(os.environ)).run_dir or "runs/failure")  # a copy: the Session takes it, too
    when = f"every_seconds={every[:-1]}" if every.endswith("s") else f"every_steps={every}"
    with Session("runs/failure", f"checkpoint.{when}", "checkpoint.keep=2") as run:

        def mark(name: str, at: float, step: int = 0) -> None:
            print("MARK", json.dumps([name, run.rank, os.getpid(), at, step]), flush=True)

        joined = time.time()
        model = run.replicate(torch.nn.Linear(64, 64))
        run.optimizer(lambda parameters: torch.optim.Adam(parameters, lr=0.001))
        megabytes = int(os.environ.get("FAILURE_MEGABYTES", "0"))
        run.values.setdefault("more", torch.zeros(megabytes * 250_000))
        first = True
        for _ in run.epochs(1):
            for (x,) in run.batches(TensorDataset(torch.ones(steps * run.size, 64)), run.size):
                if first:
                    for name, at in (
                        ("begun", BEGUN),
                        ("imported", IMPORTED),
                        ("joined", joined),
                        ("restored", time.time()),
                    ):
                        mark(name, at, run.steps)
                    for file in sorted(run_dir.glob("killed-*")):  # what it printed went with its launcher
                        mark("killed", *json.loads(file.read_text()))
                    first = False
                fired = run_dir / f"killed-{run.steps}"
                if (
                    run.steps in fates
                    and run.rank == run.size - 1
                    and kind in ("rank", "launcher")
                    and not fired.exists()
                ):
                    fired.write_text(json.dumps([time.time(), run.steps]))
                    os.kill(os.getpid() if kind == "rank" else os.getppid(), signal.SIGKILL)
                time.sleep(seconds)
                run.step(model(x).square().mean())
                if run.leader:
                    mark("step", time.time(), run.steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], [int(word) for word in sys.argv[5:]])
