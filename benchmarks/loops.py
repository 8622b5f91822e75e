"""python benchmarks/loops.py OTHER [--rounds 9] [--out FILE]

Whole trainings by the loop of this checkout (new) and by that of another one (old), each with the Python of its `.venv` if it has
one, in turn: old new, new old, …, after one of each that does not count. Images a second by summary.json, and the seconds of a
start until the loop is ready (`prepared` in events.jsonl), for three recipes on generated data and 1 and 2 ranks, one thread a
rank. The interval of new / old is a bootstrap of the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from scipy import stats

from benchmarks.measure import Better, Figure, Run, figure, interleaved, options, ratios
from lockstep.training.cli import positive
from lockstep.training.contract import UserError, user_errors

HERE = Path(__file__).parents[1]
COMMON = [
    "epochs=2", "uneven=weight", "evaluate.every=2", "checkpoint.every_steps=1000000", "data.num_shards=4",
    "data.download=false", "schedule=[]", "log.report=false", "sync.name=flat",
]  # fmt: skip
RECIPES = {
    "smoke": [
        "global_batch_size=96", "data.source=synthetic", "data.options={n: 19200, n_test: 20, size: 8, noise: 1.5}", "augment.crop=1",
    ],
    "resnet9": [
        "global_batch_size=12", "data.source=synthetic", "data.options={n: 360, n_test: 12, size: 32, noise: 1.5}", "lr=0.0001",
    ],
    "mlp": [
        "global_batch_size=12", "data.options={n: 24000, features: 64, informative: 32, redundant: 32, classes: 4}", "lr=0.01",
    ],
}  # fmt: skip
"""What is small is the network and its batch: so that the loop around it shows."""


def train(checkout: Path, recipe: str, ranks: int, data: Path) -> tuple[float, float]:
    """(images a second, seconds until the loop was ready) of one training. Raises `RuntimeError` with its output where it fails."""
    python = checkout / ".venv/bin/python"
    command = [str(python if python.exists() else sys.executable), "-m", "lockstep.training"]
    command += ["launch", "--ranks", str(ranks)] if ranks > 1 else []
    threads = {"OMP_NUM_THREADS": "1", "LOCKSTEP_THREADS": "1", "LOCKSTEP_METRICS_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command += ["run", recipe, "--run-dir", str(run), "--set", f"data.root={data}", *COMMON, *RECIPES[recipe]]
        env = {**os.environ, **threads, "PYTHONPATH": str(checkout)}
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            raise RuntimeError(
                f"{recipe} of {checkout} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
        summary = json.loads((run / "summary.json").read_text())
        return summary["images_per_second"], next(e["seconds"] for e in events if e["event"] == "prepared")


def compared(values: dict[str, list[float]], better: Better) -> Figure:
    """Of new / old, round by round."""
    found, pairs = ratios(values, "new", "old", better), [new / old for new, old in zip(values["new"], values["old"])]
    if len(set(pairs)) < 2:
        return found
    bounds = stats.bootstrap((pairs,), np.median, method="percentile", rng=0).confidence_interval
    return dataclasses.replace(found, interval=(float(bounds.low), float(bounds.high)))


def commit(checkout: Path) -> str:
    words = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--ranks", nargs="+", type=positive, default=[1, 2])
    options(parser, rounds=9)
    args = parser.parse_args()
    checkouts = {"old": args.other.resolve(), "new": HERE}
    if not (checkouts["old"] / "lockstep").is_dir():
        raise UserError(f"{args.other} is no checkout of Lockstep: it has no folder lockstep")
    measured = Run("loops", argparse.Namespace(out=args.out, **{name: commit(at) for name, at in checkouts.items()}))
    rows: dict[str, Figure] = {}
    rounds: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe, ranks in itertools.product(args.recipes, args.ranks):
            case = f"{recipe}, {ranks} rank{'s' * (ranks > 1)}"
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in checkouts}

            def turn(name: str) -> Callable[[], None]:
                return lambda: found[name].append(train(checkouts[name], recipe, ranks, Path(folder) / name))  # noqa: B023

            interleaved({name: turn(name) for name in checkouts}, args.rounds)
            rounds[case] = {name: runs[-args.rounds :] for name, runs in found.items()}
            kinds: tuple[tuple[str, str, Better], ...] = (("images", "images/s", "more"), ("start", "s", "less"))
            for place, (what, unit, better) in enumerate(kinds):
                values = {name: [run[place] for run in runs] for name, runs in rounds[case].items()}
                rows |= {f"{case}, {what}, {name}": figure(of, unit, better) for name, of in values.items()}
                rows[f"{case}, {what}, new / old"] = compared(values, better)
    return measured.finish(rows, {"rounds": rounds})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
