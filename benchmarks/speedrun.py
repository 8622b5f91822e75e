"""python benchmarks/speedrun.py --data-root DATA [--bag CHECKOUT] [--airbench CHECKOUT] [--hiverge CHECKOUT]
                              [--runs 20] [--cold 3] [--ours bag_of_tricks speedrun speedrun-2025] [--seconds S]

Our recipes against the published CIFAR-10 codes, on the same images, one training at a time in turn, by three clocks:

  own     what each code counts itself: bag of tricks, and our column beside it, the training steps alone; the others
          whitening, training and the last evaluation
  whole   from uint8 images on the device to the accuracy, with whatever the code does on the way
  cold    from the start of a process to the accuracy: imports, data, compilation, everything (`--cold` runs each)

The gate: our accuracy is not worse by 0.1 points, at 95 % (one-sided, Welch's t test). On these
images only: accuracies on other copies of CIFAR-10 do not compare. airbench and hiverge need a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from scipy import stats

from benchmarks import contestants
from benchmarks.contestants import Outcome
from benchmarks.measure import RESULTS, Worker, machine, write

ROOT = Path(__file__).parents[1]
ON_GPU = ["precision=float16", "capture=auto", "nonfinite=ignore"]
OURS = {
    "bag_of_tricks": ("bag_of_tricks", []),
    "speedrun": ("speedrun", []),
    "speedrun-2025": (
        "speedrun",
        [
            "model_options.activation=silu", "model_options.momentum=0.4434", "global_batch_size=1536",
            "loss.smoothing=0.09", "data.augment.brightness=0.14", "data.augment.contrast=0.13",
            "evaluate.tta_share=0.25", "optim.normalise_every=4",
        ],
    ),
}  # fmt: skip
"""Name → (recipe, settings)."""
AGAINST = {"bag_of_tricks": ("bag",), "speedrun": ("airbench", "hiverge"), "speedrun-2025": ("airbench", "hiverge")}
MARGIN = 0.1
"""Percentage points by which our mean accuracy may be lower."""


def settings_of(name: str, device: str, extra: list[str]) -> list[str]:
    return [f"device={device}", *(ON_GPU if device == "cuda" else []), *OURS[name][1], *extra]


def cold(name: str, args: argparse.Namespace) -> tuple[float, float]:
    """(seconds, accuracy) of one training in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        if name in OURS:
            words = settings_of(name, args.device, args.set)
            words += [f"data.root={args.data_root}", *contestants.BARE]
            command = [sys.executable, "-m", "lockstep.training", "run", OURS[name][0], "--run-dir", f"{folder}/run"]
            command += ["--set", *words]
        else:
            command = [sys.executable, str(ROOT / "benchmarks" / "contestants.py")]
            command += [name, str(getattr(args, name)), str(args.data_root)]
        # A cold start has compiled nothing before.
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        if name in OURS:
            return seconds, json.loads(Path(folder, "run", "summary.json").read_text())["accuracy"]
        return seconds, json.loads(done.stdout.splitlines()[-1])["accuracy"]


def warm(
    args: argparse.Namespace, names: list[str], deadline: float, failed: dict[str, str]
) -> dict[str, list[Outcome]]:
    """Trainings in turn, each contestant in a process that lives through all of them; the first of each is not counted.

    Who fails goes into `failed` and does not run again.
    """
    workers: dict[str, Worker] = {}
    found: dict[str, list[Outcome]] = {}
    try:
        for name in names:
            try:
                if name in OURS:
                    words = settings_of(name, args.device, args.set)
                    workers[name] = Worker(contestants.ours, OURS[name][0], str(args.data_root), words)
                else:
                    workers[name] = Worker(contestants.PEERS[name], str(getattr(args, name)), str(args.data_root))
                found[name] = []
            except RuntimeError as error:
                failed[name] = str(error)
        running = list(found)
        for number in range(args.runs + 1):
            turn = number % max(len(running), 1)
            for name in running[turn:] + running[:turn]:
                try:
                    _, outcome = workers[name].run(number)
                except RuntimeError as error:
                    failed[name] = str(error)
                    continue
                if number:
                    found[name].append(outcome)
            running = [name for name in running if name not in failed]
            if time.monotonic() > deadline and number:
                break
    finally:
        for worker in workers.values():
            worker.close()
    return {name: outcomes for name, outcomes in found.items() if outcomes}


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gate(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The difference of the mean accuracies in points, and whether it is above −MARGIN with 95 % confidence."""
    if min(len(ours), len(theirs)) < 2:
        return {"points": 100 * (statistics.mean(ours) - statistics.mean(theirs)), "at_least": None, "passed": None}
    difference = 100 * (statistics.mean(ours) - statistics.mean(theirs))
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    error = 100 * math.sqrt(sum(parts))
    # Welch–Satterthwaite: with few runs the error itself is not known well.
    freedom = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs)))
    least = difference - (float(stats.t.ppf(0.95, sum(parts) ** 2 / freedom)) * error if freedom else 0.0)
    return {"points": difference, "at_least": least, "passed": least > -MARGIN}


def compared(runs: dict[str, list[Outcome]], cold_runs: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row for each of ours and each of its peers: how many times faster, by every clock, and the gate."""
    rows = []
    for name, peers in AGAINST.items():
        for peer in peers:
            if name not in runs or peer not in runs:
                continue
            mine, theirs = runs[name], runs[peer]
            # Their own clock has the last evaluation in it, except in the bag of tricks.
            own = [one.own if peer == "bag" else one.whole for one in mine]
            row: dict[str, Any] = {
                "ours": name, "peer": peer,
                "own": statistics.median(b.own / a for a, b in zip(own, theirs)),
                "whole": statistics.median(b.whole / a.whole for a, b in zip(mine, theirs)),
                "accuracy": gate([one.accuracy for one in mine], [one.accuracy for one in theirs]),
            }  # fmt: skip
            if cold_runs.get(name) and cold_runs.get(peer):
                row["cold"] = statistics.median(b / a for a, b in zip(cold_runs[name], cold_runs[peer]))
            rows.append(row)
    return rows


def table(runs: dict[str, list[Outcome]], cold_runs: dict[str, list[float]], rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':16}{'n':>4}{'own s':>16}{'whole s':>16}{'cold s':>16}{'accuracy %':>16}"]
    for name, outcomes in runs.items():
        cells = [spread([one.own for one in outcomes]), spread([one.whole for one in outcomes])]
        text = "".join(f"{mean:>9.2f} ± {std:4.2f}" for mean, std in cells)
        text += "{:>9.2f} ± {:4.2f}".format(*spread(cold_runs[name])) if cold_runs.get(name) else " " * 16
        mean, std = spread([one.accuracy for one in outcomes])
        lines.append(f"{name:16}{len(outcomes):>4}{text}{100 * mean:>9.2f} ± {100 * std:4.2f}")
    for row in rows:
        verdict = {True: "passed", False: "NOT passed", None: "too few runs"}[row["accuracy"]["passed"]]
        ratios = f"own {row['own']:.2f} ×, whole {row['whole']:.2f} ×"
        ratios += f", cold {row['cold']:.2f} ×" if "cold" in row else ""
        lines.append(
            f"{row['ours']} against {row['peer']}: {ratios}; {row['accuracy']['points']:+.2f} points, gate {verdict}"
        )
    return "\n".join(lines)


def draw(runs: dict[str, list[Outcome]], path: Path, title: str) -> None:
    """Every training as a point: seconds by the `whole` clock against accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (name, outcomes), mark in zip(runs.items(), "osD^v<>"):
        axes.plot(
            [one.whole for one in outcomes], [100 * one.accuracy for one in outcomes], mark, label=name, alpha=0.6
        )
    axes.set(xlabel="seconds from images on the device to the accuracy", ylabel="test accuracy (%)", title=title)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs that fit into `args.seconds`; at least one of each after the warm-up. A contestant that fails is left out."""
    deadline = time.monotonic() + args.seconds
    names = [*args.ours, *(name for name in contestants.PEERS if getattr(args, name))]
    cold_runs: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for _ in range(args.cold):
        for name in names:
            if name not in failed and time.monotonic() < deadline:
                try:
                    cold_runs[name].append(cold(name, args)[0])
                except RuntimeError as error:
                    failed[name] = str(error)
    runs = warm(args, [name for name in names if name not in failed], deadline, failed)
    for name, why in failed.items():
        print(f"{name} FAILED: {why}", file=sys.stderr)
    rows = compared(runs, cold_runs)
    print(table(runs, cold_runs, rows))
    every = {name: [[one.own, one.whole, one.accuracy] for one in outcomes] for name, outcomes in runs.items()}
    result = {"runs": every, "columns": ["own", "whole", "accuracy"], "cold": cold_runs, "compared": rows}
    result["failed"] = failed
    if args.png:
        draw(runs, args.png, f"{args.data_root.name}, {machine()['torch']}")
    return result


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data-root", type=Path, required=True, help="folder that holds cifar-10-batches-py or the like"
    )
    parser.add_argument("--bag", type=Path, help="checkout of 99991/cifar10-fast-simple")
    parser.add_argument("--airbench", type=Path, help="checkout of KellerJordan/cifar10-airbench")
    parser.add_argument("--hiverge", type=Path, help="checkout of ljbuturovic/cifar10-speedrun")
    parser.add_argument("--ours", nargs="+", choices=sorted(OURS), default=list(OURS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--cold", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600, help="no further round of warm runs after so long")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="further settings of ours")
    parser.add_argument("--png", type=Path, help="a chart of all runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "speedrun.json")
    args = parser.parse_args(words)
    for name in contestants.PEERS:
        checkout = getattr(args, name)
        if checkout and not checkout.is_dir():
            parser.error(f"--{name} {checkout}: no such folder")
        if checkout and name != "bag" and args.device == "cpu":
            parser.error(f"--{name} needs a GPU: its code is written for CUDA")
        if checkout:
            setattr(args, name, checkout.resolve())
    args.data_root = args.data_root.resolve()
    return args


def main() -> None:
    args = arguments()
    result = measure(args)
    print(f"written to {write('speedrun', {'machine': machine(), **result}, args.out)}")


if __name__ == "__main__":
    main()
