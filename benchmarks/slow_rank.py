"""python benchmarks/slow_rank.py [--steps 500] [--quiet-steps 12000] [--rounds 1]

What `lockstep top`, the status and the alert say that a slow rank costs, against what is gained once it is slow no longer.

Jobs of two ranks of this machine on gloo, one thread each: a small network, and 30 ms a step in which the rank waits, as for a device.
Rank 1 is throttled by a share of an undisturbed step, while it computes (it
computes more) or before its batch (it sleeps): STEPS of quiet, STEPS throttled, STEPS of quiet again.

*told*: the share of every step that the run itself told last while the rank was throttled. *gained*: mean seconds of a throttled step less
those of the quiet steps on both sides, of a throttled one; the first steps after each change are left out. *late*: seconds from the
throttled step to the moment that is told as its beginning.
*false names*: the blocks of a run of QUIET-STEPS without a throttle, cut into 200 windows that are judged alone; and what that run told.
*overhead*: seconds in what watches the ranks, on rank 0, of all seconds of that run's steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.measure import Figure, Run, figure, options
from lockstep.training.observe.slow import LEAST_BLOCKS, PHASES, History

ROOT = Path(__file__).parents[1]
SHARES = (0.05, 0.1, 0.2, 0.5)
WINDOWS, BLOCKS = 200, 15
"""Of the quiet run, and blocks of a window."""
DEVICE = 0.03
"""Seconds of a step in which the rank waits as for a device, so that it is not the other programs of this machine that are measured."""
SETTLES = 20
"""Steps after a change that are left out."""
JOB = """
import sys, time
import numpy as np
import torch
from lockstep import Session
from lockstep.training.observe import slow

run_dir, out, phase, share, first, end, steps = *sys.argv[1:4], float(sys.argv[4]), *map(int, sys.argv[5:])
spent, told, blocks, marks = [0.0], [], [], []

def timed(self, *words, add=slow.SlowRank.add):
    began = time.perf_counter()
    try:
        return add(self, *words)
    finally:
        spent[0] += time.perf_counter() - began

def noted(self, own, seconds, step, now, add=slow.History.add):
    add(self, own, seconds, step, now)
    blocks.append((own, seconds, step, now))
    found = self.verdict
    told.append((step + len(own), -1, 0, 0, 0) if found is None else
                (step + len(own), found.rank, found.share, found.since, slow.PHASES.index(found.phase)))

slow.SlowRank.add, slow.History.add = timed, noted

def throttle(where):
    if phase == where and run.rank == 1 and first <= len(marks) < end:
        return share * float(np.median(np.diff(marks[SETTLES:first])))
    return 0.0

class Loader:
    def __len__(self):
        return steps
    def __iter__(self):
        for _ in range(steps):
            time.sleep(throttle("data"))
            yield torch.full((64, 256), 1.0 + run.rank)

def loss(x):
    found, end_of_it = model(x).square().mean(), time.perf_counter() + throttle("compute")
    while time.perf_counter() < end_of_it:
        x @ x.T
    time.sleep(DEVICE)
    return found

with Session(run_dir, "log.report=false") as run:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = run.replicate(torch.nn.Sequential(*layers))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1e-6))
    for _ in run.epochs(1):
        for x in run.iterate(Loader()):
            run.step(loss, x, samples=len(x))
            marks.append(time.time())
    if run.rank == 0:
        lengths = [len(own) for own, *_ in blocks]
        own = np.concatenate([own for own, *_ in blocks])
        rest = np.array([block[1:] for block in blocks])
        np.savez(out, marks=marks, told=told, spent=spent, lengths=lengths, own=own, rest=rest)
""".replace("SETTLES", str(SETTLES)).replace("DEVICE", str(DEVICE))


def job(folder: Path, phase: str, share: float, first: int, end: int, steps: int) -> Any:
    """What rank 0 of one job has noted. Raises `CalledProcessError`."""
    out = folder / "noted.npz"
    words = [str(folder / "run"), str(out), phase, str(share), str(first), str(end), str(steps)]
    command = [
        sys.executable,
        "-m",
        "lockstep.training",
        "launch",
        "--ranks",
        "2",
        "--",
        sys.executable,
        "-c",
        JOB,
        *words,
    ]
    env = {**os.environ, "LOCKSTEP_THREADS": "1", "OMP_NUM_THREADS": "1", "LOCKSTEP_METRICS_PORT": "0"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return np.load(out)


def throttled(phase: str, share: float, steps: int) -> dict[str, Any]:
    """Shares of a step that were told and gained, and when."""
    with tempfile.TemporaryDirectory() as folder:
        noted = job(Path(folder), phase, share, steps, 2 * steps, 3 * steps)
    seconds = np.diff(noted["marks"])
    slow = seconds[steps + SETTLES : 2 * steps - 1].mean()
    quiet = np.concatenate([seconds[SETTLES : steps - 1], seconds[2 * steps + SETTLES :]]).mean()
    during = [row for row in noted["told"] if row[0] <= 2 * steps + 1]
    _, rank, cost, since, where = during[-1]
    row = {
        "phase": phase,
        "share": share,
        "steps": steps,
        "gained": float(1 - quiet / slow),
        "step_seconds": float(quiet),
    }
    if rank < 0:
        return {**row, "named": False}
    right = bool(rank == 1 and PHASES[int(where)] == phase)
    late = float(since - noted["marks"][steps - 1])
    return {**row, "named": right, "told": float(cost), "error": float(cost) - row["gained"], "late_seconds": late}


def quiet(steps: int) -> dict[str, Any]:
    """How often a rank is named though none is throttled, and what it takes to look."""
    with tempfile.TemporaryDirectory() as folder:
        noted = job(Path(folder), "none", 0.0, 0, 0, steps)
    own, rest, marks = noted["own"], noted["rest"], noted["marks"]
    windows = []
    for window in np.array_split(np.arange(len(own)), WINDOWS):
        history, mean = History([0, 1]), rest[:, 0].sum() / len(own)
        for part in np.array_split(window, BLOCKS):
            history.add(own[part], mean * len(part), int(part[0]) + 1, float(part[-1]) * mean)
        windows.append(history.verdict)
    costs = [found.share for found in windows if found is not None]
    online = [rank for rank, _ in groupby(row[1] for row in noted["told"]) if rank >= 0]
    return {
        "windows": WINDOWS, "steps_of_window": len(own) // WINDOWS, "false_names": len(costs), "their_shares": costs,
        "seconds": float(marks[-1] - marks[0]), "named_by_the_run": len(online), "looks": len(noted["told"]),
        "overhead": float(noted["spent"][0] / (marks[-1] - marks[0])), "blocks_needed": LEAST_BLOCKS,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="of each part of a throttled run (default: %(default)s)")
    parser.add_argument("--quiet-steps", type=int, default=12_000, help="of the quiet run (default: %(default)s)")
    options(parser, rounds=1)
    args = parser.parse_args()
    run, rows, figures = Run("slow_rank", args), [], dict[str, Figure]()
    for _ in range(args.rounds):
        for share in SHARES:
            for phase in ("compute", "data"):
                rows.append(throttled(phase, share, args.steps))
                print(rows[-1], flush=True)
    found = quiet(args.quiet_steps)
    print(found, flush=True)
    for share in SHARES:
        errors = [abs(row["error"]) for row in rows if row["share"] == share and row["named"]]
        if errors:
            figures[f"throttled by {share:.0%}: |told - gained|"] = figure(errors)
    print(f"median step {statistics.median(row['step_seconds'] for row in rows) * 1e3:.1f} ms")
    return run.finish(figures, {"throttled": rows, "quiet": found})


if __name__ == "__main__":
    sys.exit(main())
