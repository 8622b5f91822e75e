"""python -m benchmarks.scaling --ranks 1,2,4: how much faster are more ranks, and where does the time go?

Each number of ranks trains the same recipe on synthetic images, with the global batch fixed and with the batch a rank
fixed; `--strategies` adds a row for each gradient-sync strategy. Every rank has the same number of CPU threads at every
world size, as every rank of a cluster has its own device. The runs take turns, and medians over the steps are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

import yaml

from lockstep.training import config as configuration
from lockstep.training import sync
from lockstep.training.cli import add_set, positive
from lockstep.training.contract import EVENTS_FILE, user_errors
from lockstep.training.parallel.world import cores

PHASES = ("data", "compute", "waiting", "rest")
"""What a step is made of: waiting for samples, forward and backward pass, waiting for other ranks, the optimizer."""
EVENTS = ("step_duration", "data_wait", "grad_ready", "sync_wait")
WARM_UP = 3


@dataclass
class Row:
    """One way to train, and what its runs have shown."""

    name: str
    ranks: int
    batch: int
    threads: int
    changes: tuple[str, ...] = ()
    steps: list[list[float]] = field(default_factory=list)
    """Seconds of rank 0: of each step, and of its data, computation and wait for other ranks."""
    memory: float = 0.0
    """Bytes of the largest rank, torch included; on a GPU the most in tensors."""
    sent: float = 0.0
    """Bytes of gradients that a rank hands to collectives in a step."""
    failed: str = ""

    @property
    def step(self) -> float:
        """Of the median step; its phases add up to it."""
        return median_low(self.steps)[0]

    @property
    def phases(self) -> list[float]:
        step, *parts = median_low(self.steps)
        return [*parts, step - sum(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks",
        type=lambda text: [*map(positive, text.split(","))],
        default=[1, 2],
        metavar="1,2,4",
        help="numbers of ranks (default: 1,2)",
    )
    parser.add_argument("--recipe", default="smoke", help="what to train (default: smoke)")
    parser.add_argument("--batch", type=positive, help="at the smallest number of ranks; default: the recipe's")
    parser.add_argument("--steps", type=positive, default=20, help="steps of a run that are timed (default: 20)")
    parser.add_argument("--rounds", type=positive, default=3, help="how often each is trained (default: 3)")
    parser.add_argument("--threads", type=positive, help="CPU threads a rank; default: cores / the most ranks")
    parser.add_argument(
        "--strategies",
        default="",
        metavar="ddp,flat",
        help='strategies to compare, or all; with options: "exact parts=4"',
    )
    add_set(parser, "change settings of the recipe")
    args = parser.parse_args()
    ranks, most = sorted(set(args.ranks)), max(args.ranks)
    settings = configuration.load(args.recipe, args.assignments)
    batch = args.batch or settings.global_batch_size or (settings.batch_size or 0) * ranks[0]
    threads = args.threads or max(1, cores() // most)
    rows = [Row("batch fixed", size, batch, threads) for size in ranks]
    rows += [Row("batch grows", size, batch * size // ranks[0], threads) for size in ranks[1:]]
    for name in list(sync.STRATEGIES) if args.strategies == "all" else filter(None, args.strategies.split(",")):
        strategy, *words = name.split()
        options = {option: yaml.safe_load(value) for option, value in (word.split("=", 1) for word in words)}
        chosen = sync.build({"name": strategy, "options": options}).settings
        size = 1 if chosen.name.endswith(":DataParallel") else most  # one process, on the threads of all
        changes = (f"sync.name={chosen.name}", f"sync.options={json.dumps(chosen.options)}")
        rows.append(Row(name.rpartition(":")[2], size, batch, threads * most // size, changes))
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        for number in range(args.rounds):
            turn = number % len(rows)  # none is always first
            for row in rows[turn:] + rows[:turn]:
                print(f"round {number + 1}: {row.name}, {row.ranks} rank(s)", file=sys.stderr, flush=True)
                _run(row, args, Path(folder), Path(folder) / f"run-{number}-{rows.index(row)}")
    print(f"{args.recipe}, {args.rounds} × {args.steps} steps, {threads} thread(s) a rank of {cores()} cores\n")
    print(
        f"{'':14}ranks  batch  images/s  speed-up  step ms |{''.join(f'{p:>9}' for p in PHASES)} | memory MB  sent MB"
    )
    for row in rows:
        if row.failed or rows[0].failed:
            print(f"{row.name:14}{row.ranks:5}  {row.failed}")
            continue
        speed_up = row.batch / row.step / (rows[0].batch / rows[0].step)
        rates = f"{row.batch:5} {row.batch / row.step:9.1f} {speed_up:8.2f}× {1000 * row.step:8.1f}"
        phases = "".join(f"{1000 * seconds:9.1f}" for seconds in row.phases)
        print(f"{row.name:14}{row.ranks:5}  {rates} |{phases} | {row.memory / 1e6:9.1f} {row.sent / 1e6:8.2f}")
    if not any(row.failed for row in rows[: len(ranks)]):
        print(f"\n{why(rows[: len(ranks)])}")


def _run(row: Row, args: argparse.Namespace, folder: Path, run: Path) -> None:
    """Trains in separate processes. The warm-up does not count, nor does the last step, which ends the epoch."""
    steps = WARM_UP + args.steps + 1
    settings = [
        "data.source=synthetic", f"data.options={{n: {row.batch * steps}, n_test: 16, size: 32}}", f"data.root={folder / 'data'}",
        f"global_batch_size={row.batch}", "uneven=weight", "epochs=1", f"threads={row.threads}", "log.every=1",
    ]  # fmt: skip
    launch = [sys.executable, "-m", "lockstep.training", "launch", "--ranks", str(row.ranks), "run", args.recipe]
    words = ["--run-dir", str(run), "--set", *args.assignments, *settings, *row.changes]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "rror: " in line]
        row.failed = (errors or [f"ended with {done.returncode}"])[-1]
        return
    events = [json.loads(line) for line in (run / EVENTS_FILE).read_text().splitlines()]
    counted = [event for event in events if event["event"] == "step"][WARM_UP:-1]
    row.steps += [[event[name] for name in EVENTS] for event in counted]
    for file in run.glob("metrics/rank-*.prom"):
        samples = [line.rsplit(" ", 1) for line in file.read_text().splitlines() if line[:1] != "#"]
        values = {name.partition("{")[0]: float(value) for name, value in samples}
        on_gpu = values.get("training_gpu_memory_peak_bytes", 0.0)
        row.memory = max(row.memory, on_gpu or values["training_process_resident_memory_bytes"])
        row.sent = values["training_sync_bytes_total"] / steps


def why(rows: list[Row]) -> str:
    """Says from the measured phases why the most ranks are not as many times as fast as the fewest."""
    first, last = rows[0], rows[-1]
    if first is last:
        return "One number of ranks has no speed-up to explain: give --ranks at least two."
    ratio = last.ranks / first.ranks
    extra = [1000 * (now - before / ratio) for now, before in zip(last.phases, first.phases)]
    parts = ", ".join(f"{name} {more:+.1f} ms" for more, name in sorted(zip(extra, PHASES), reverse=True))
    return (
        f"Why is it not {ratio:g}×? At {last.ranks} ranks and the same global batch a step takes {1000 * last.step:.1f} ms where "
        f"1/{ratio:g} of the step on {first.ranks} would be {1000 * first.step / ratio:.1f} ms. The difference: {parts}."
    )


if __name__ == "__main__":
    with user_errors():
        main()
