"""python benchmarks/slow_rank.py [--steps 1000] [--quiet-steps 6000] [--rounds 1]

What `lockstep top`, the status and the alert say that a slow rank costs, against what is gained once it is slow no longer.

Jobs of two ranks of this machine on gloo, one thread each: a small network, and 30 ms a step in which the rank waits, as for a device.
Rank 1 is throttled by a share of an undisturbed step, while it computes (it computes more) or before its batch (it sleeps). Ten throttled
steps and ten others take turns, so that both meet the same machine.

*shown*: what is said of rank 1 on average, by the same code as in a run, where the blocks of all undisturbed steps come first, and then
those of all throttled ones; and at how many looks it is named.
*gained*: mean seconds of a throttled step less those of an undisturbed one, of a throttled one; with its standard error, from the turns.
*false names*: the steps of a run of QUIET-STEPS without a throttle, cut into 200 windows that are judged alone; and those of the run.
*overhead*: seconds that rank 0 spends in what watches the ranks (this, goodput, and what a hang is seen by), of all seconds of that run's
steps, waits included; and CPU seconds of the launcher, which looks for hangs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from benchmarks.measure import Figure, Run, figure, options
from lockstep.training.observe.steps import BLOCKS, History, Verdict

ROOT = Path(__file__).parents[1]
SHARES = (0.05, 0.1, 0.2, 0.5)
WINDOWS, PARTS = 200, 15
"""Of the quiet run, and blocks of a window."""
DEVICE = 0.03
"""Seconds of a step in which the rank waits as for a device, so that it is not the other programs of this machine that are measured."""
SETTLES, TURN = 100, 10
"""Undisturbed steps at first, by whose median the rank is throttled; steps of a turn, the first and last of which are left out."""
JOB = (
    """
import os, sys, time
from pathlib import Path
import numpy as np
import torch
from lockstep import Session
from lockstep.training.observe import steps
from lockstep.training.observe.goodput import GoodputRecorder
from lockstep.wire.progress import Progress

run_dir, out, phase, share, steps = *sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5])
spent, shown, blocks, ends, marks, launcher = [0.0, 0.0, 0.0], [], [], [], [], []

def timed(part, owner, name):
    call = getattr(owner, name)
    def replaced(self, *words):
        began = time.perf_counter()
        try:
            return call(self, *words)
        finally:
            spent[part] += time.perf_counter() - began
    setattr(owner, name, replaced)

def launchers_seconds():
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

def noted(self, own, seconds, add=steps.History.add):
    add(self, own, seconds)
    blocks.append((own, seconds))
    shown.append(-1 if self.verdict is None else self.verdict.rank)

def looked(self, store, look=steps.SlowRank._look):
    if found := look(self, store):
        ends.append(self._read)
    return found

steps.History.add, steps.SlowRank._look = noted, looked
for part, owner, name in (
    (0, steps.SlowRank, "step_done"), (1, GoodputRecorder, "step_done"), (1, GoodputRecorder, "alive"), (2, Progress, "alive"),
):
    timed(part, owner, name)

def throttle(where):
    number = len(marks)
    if phase == where and run.rank == 1 and number >= SETTLES and number // TURN % 2:
        return share * float(np.median(np.diff(marks[TURN:SETTLES])))
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

with Session(run_dir) as run:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = run.replicate(torch.nn.Sequential(*layers))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1e-6))
    for _ in run.epochs(1):
        for x in run.iterate(Loader()):
            run.step(loss, x, samples=len(x))
            marks.append(time.time())
            if len(marks) == SETTLES:
                spent[:] = [0.0, 0.0, 0.0]
                launcher.append(launchers_seconds())
    launcher.append(launchers_seconds())
    if run.rank == 0:
        own, seconds = np.concatenate([own for own, _ in blocks]), [seconds for _, seconds in blocks]
        numbers = np.concatenate([end - len(own) + np.arange(len(own)) for end, (own, _) in zip(ends, blocks)])  # from 0, as in `marks`
        np.savez(out, marks=marks, shown=shown, spent=spent, launcher=np.diff(launcher), numbers=numbers, own=own, seconds=seconds)
""".replace("SETTLES", str(SETTLES))
    .replace("TURN", str(TURN))
    .replace("DEVICE", str(DEVICE))
)


def job(folder: Path, phase: str, share: float, steps: int) -> Any:
    """What rank 0 of one job has noted. Raises `CalledProcessError`."""
    out = folder / "noted.npz"
    words = [str(folder / "run"), str(out), phase, str(share), str(steps)]
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


def judged(times: Sequence[Any], seconds: Sequence[float]) -> list[Verdict | None]:
    """What is said of ranks after each of these blocks of steps."""
    history, said = History([0, 1]), []
    for own, took in zip(times, seconds):
        history.add(own, took)
        said.append(history.verdict)
    return said


def throttled(phase: str, share: float, steps: int) -> dict[str, Any]:
    """Shares of a step that are shown and gained."""
    with tempfile.TemporaryDirectory() as folder:
        noted = job(Path(folder), phase, share, steps)
    own = dict(zip(noted["numbers"], noted["own"]))
    seconds = np.diff(noted["marks"], prepend=0.0)
    turns: list[list[list[int]]] = [[], []]
    for begin in range(SETTLES, steps, TURN):
        turn = [number for number in range(begin + 1, min(begin + TURN - 1, steps)) if number in own]
        if turn:
            turns[begin // TURN % 2].append(turn)
    blocks = [*turns[0], *turns[1]]
    said = judged(
        [np.stack([own[n] for n in turn]) for turn in blocks], [float(seconds[turn].sum()) for turn in blocks]
    )
    quick, slow = (float(np.concatenate([seconds[turn] for turn in some]).mean()) for some in turns)
    means = [[float(seconds[turn].mean()) for turn in some] for some in turns]
    error = sum(statistics.variance(some) / len(some) for some in means) ** 0.5 / slow
    row = {
        "phase": phase,
        "share": share,
        "blocks": len(blocks),
        "step_seconds": quick,
        "gained": 1 - quick / slow,
        "gained_error": error,
    }
    looks = said[len(turns[0]) + BLOCKS - 1 :]
    shares = [one.share for one in looks if one is not None and (one.rank, one.phase) == (1, phase)]
    named = {"looks": len(looks), "named": len(shares)}
    if not shares:
        return {**row, **named}
    shown = statistics.mean(shares)
    return {**row, **named, "shown": shown, "error": shown - (1 - quick / slow)}


def quiet(steps: int) -> dict[str, Any]:
    """How often a rank is named though none is throttled, and what it takes to look."""
    with tempfile.TemporaryDirectory() as folder:
        noted = job(Path(folder), "none", 0.0, steps)
    own, marks = noted["own"], noted["marks"]
    mean = float(noted["seconds"].sum() / len(own))
    windows = []
    for window in np.array_split(own, WINDOWS):
        parts = np.array_split(window, PARTS)
        windows += [one for one in judged(parts, [mean * len(part) for part in parts]) if one is not None][:1]
    watched = float(marks[-1] - marks[SETTLES - 1])
    spent = dict(zip(("slow_rank", "goodput", "hang"), (float(seconds) / watched for seconds in noted["spent"])))
    online = [rank for rank, _ in groupby(noted["shown"]) if rank >= 0]
    return {
        "windows": WINDOWS, "steps_of_window": len(own) // WINDOWS,
        "false_names": len(windows), "their_shares": [one.share for one in windows],
        "seconds": float(marks[-1] - marks[0]), "named_by_the_run": len(online), "looks": len(noted["shown"]),
        "overhead": spent, "launcher": float(noted["launcher"][0] / watched), "blocks_needed": BLOCKS,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each throttled run (default: %(default)s)")
    parser.add_argument("--quiet-steps", type=int, default=6000, help="of the quiet run (default: %(default)s)")
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
            figures[f"throttled by {share:.0%}: |shown - gained|"] = figure(errors)
    print(f"median step {statistics.median(row['step_seconds'] for row in rows) * 1e3:.1f} ms")
    return run.finish(figures, {"throttled": rows, "quiet": found})


if __name__ == "__main__":
    sys.exit(main())
