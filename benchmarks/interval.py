"""python benchmarks/interval.py [--every 0.5 2 10] [--failures 3] [--apart 10] [--megabytes 100] [--rounds 2] [--out FILE] [--check]

What saving often costs and what saving seldom costs, beside Young's and Daly's formula: a job of two ranks that loses a rank
every `--apart` seconds of training, once with each interval, the same failures each time. A day with a failure an hour
is too long to measure; this is such a day in miniature, and the last table carries its costs over to the day.

Of each run: the seconds beyond those of the same steps without checkpoints and failures, divided into the restarts (SIGKILL to
the first step), the steps that were taken twice, and the rest, which is the saving.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import figures
from benchmarks.failure import PARTS, Mark, launched, parts
from lockstep.training.checkpoint.interval import Interval
from lockstep.training.contract import UserError, user_errors

SECONDS = 0.05
"""Of a step."""
DAY, HOUR = 86_400.0, 3_600.0
NEVER = "1000000"


def train(steps: int, every: str, fates: list[int], megabytes: int) -> set[Mark]:
    """The marks of one run of two ranks, the last of which is killed at `fates`."""
    return launched(2, steps, every, SECONDS, "rank", fates, megabytes)


def seconds_of(seen: set[Mark]) -> float:
    """From the end of the first step to the end of the last one."""
    ends = [mark.at for mark in seen if mark.name == "step"]
    return max(ends) - min(ends)


def costs(seen: set[Mark], calm: float, failures: int) -> dict[str, float]:
    """Seconds a failure of each part of what was lost."""
    killed = {mark.step: mark for mark in seen if mark.name == "killed"}  # every later start prints it again
    found = [parts(mark, seen) for mark in killed.values()]
    if len(found) != failures or None in found:
        raise UserError(f"{len(found)} failures were seen, {failures} were asked for")
    restarts = sum(one[name] for one in found if one for name in PARTS[:-1])
    replayed = sum(one["replayed"] for one in found if one)
    lost = seconds_of(seen) - calm
    return {"lost": lost / failures, "restart": restarts / failures, "replayed": replayed / failures,
            "saving": (lost - restarts - replayed) / failures}  # fmt: skip


def expected(cost: float, restart: float, every: float, apart: float) -> float:
    """Seconds lost for each failure, by Young and Daly: the saves in `apart` seconds, half an interval, the restart."""
    return cost * apart / every + min(every, apart) / 2 + restart


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=2)
    parser.add_argument("--every", type=float, nargs="+", default=[0.5, 2, 10], help="seconds between checkpoints")
    parser.add_argument("--failures", type=int, default=3)
    parser.add_argument(
        "--apart", type=float, default=10.0, help="seconds of training between two failures, in the mean"
    )
    parser.add_argument("--megabytes", type=int, default=100, help="of a checkpoint")
    args = parser.parse_args()
    measured = figures.Run("interval", args)
    steps = int((args.failures + 1) * args.apart / SECONDS)
    found: dict[float, list[dict[str, float]]] = {every: [] for every in args.every}
    cost: list[float] = []
    for number in range(args.rounds):
        # Failures that know nothing of one another, as the formula has them.
        fates = sorted(random.Random(number).sample(range(20, steps - 20), args.failures))
        calm = seconds_of(train(steps, NEVER, [], args.megabytes))
        saves = 20
        cost.append((seconds_of(train(steps // 2, str(steps // 2 // saves), [], args.megabytes)) - calm / 2) / saves)
        for every in args.every:
            found[every].append(costs(train(steps, f"{every}s", fates, args.megabytes), calm, args.failures))
            print(every, " ".join(f"{name} {value:.2f}" for name, value in found[every][-1].items()), flush=True)
    return report(measured, found, cost, args)


def report(
    measured: figures.Run, found: dict[float, list[dict[str, float]]], cost: list[float], args: argparse.Namespace
) -> int:
    save = max(statistics.median(cost), 1e-4)
    restart = statistics.median(one["restart"] for runs in found.values() for one in runs)
    print(
        f"\na save costs {save:.4f} s, a restart {restart:.2f} s; best by the formula: every {math.sqrt(2 * save * args.apart):.2f} s"
    )
    trained = (args.failures + 1) * args.apart / args.failures  # seconds for each failure: the last stretch has none
    for every, runs in found.items():
        lost = statistics.median(one["lost"] for one in runs)
        print(
            f"every {every:g} s: {lost:.2f} s a failure, by the formula {expected(save, restart, every, trained):.2f} s"
        )
    print("\nA day with a failure an hour (a projection from these costs):")
    interval = Interval(24)
    interval.stalled(save)
    interval.written(0.0)
    auto = interval.seconds(DAY)
    for name, every in [(f"{e:g} s", e) for e in (10, 30, 60, 300, 900)] + [(f"auto ({auto:.0f} s)", auto)]:
        print(f"  every {name:14} {expected(save, restart, every, HOUR) / HOUR:.2%} of the day")
    rows = {
        f"every {every:g} s, {name}": figures.figure([one[name] for one in runs], "s a failure")
        for every, runs in found.items()
        for name in ("lost", "restart", "replayed", "saving")
    }
    rows["a save"] = figures.figure(cost, "s")
    return measured.finish(rows, {"rounds_by_interval": found, "save_seconds": cost, "restart_seconds": restart})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
