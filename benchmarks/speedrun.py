"""python benchmarks/speedrun.py --data-root DATA [--bag CHECKOUT] [--airbench CHECKOUT] [--runs 20] [--seconds S]

Our recipes against the published CIFAR-10 codes, on the same images, one training at a time in turn, by two clocks:

  own     what each code counts itself: bag of tricks, and our column beside it, the training steps alone; airbench
          whitening, training and the last evaluation
  whole   from uint8 images on the device to the accuracy, with whatever the code does on the way

The gate: our accuracy is not worse by 0.1 points, at 95 % (one-sided, Welch's t test). On these images only: accuracies on
other copies of CIFAR-10 do not compare. airbench needs a GPU. The published code is imported unchanged from its checkout;
its loader reads images that lie on the device already, and its clock is read from what it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from scipy import stats

from benchmarks.measure import RESULTS, machine, write
from lockstep.training import config
from lockstep.training.data.batches import Stored
from lockstep.training.data.sources import load
from lockstep.training.recipe import loop
from lockstep.training.recipe.evaluate import Evaluator

ON_GPU = ["compile=true"]
"""Settings of ours besides what a recipe does on a GPU: the published codes compile, too, and many trainings repay it."""
AGAINST = {"bag_of_tricks": "bag", "speedrun": "airbench"}
"""Our recipe → the published code that it is compared with."""
BOUNDED = (
    "airbench: compiled with CUDA graphs and tuned pointwise kernels in place of max-autotune, which takes minutes"
)
MARGIN = 0.1
"""Percentage points by which our mean accuracy may be lower."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training. Seconds by the code's own clock, seconds from uint8 images on the device to the accuracy, and that."""

    own: float
    whole: float
    accuracy: float


BARE = ["evaluate.every=1000", "checkpoint.every_steps=1000000"]
"""Settings of ours: one evaluation and one checkpoint, at the end."""
Run = Callable[[int], Outcome]
"""Trains once with a seed."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(recipe: str, data_root: str, assignments: list[str]) -> Run:
    """`training run RECIPE` in this process. `own` are the steps alone; `whole` is whitening, training and evaluation."""
    moments: dict[str, float] = {}

    class TimedSamples(Stored):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            synchronize()
            moments["resident"] = time.perf_counter()

    class TimedEvaluator(Evaluator):
        def score(self, *args: Any) -> Any:
            found = super().score(*args)
            moments["scored"] = time.perf_counter()
            return found

    loop.Stored, loop.Evaluator = TimedSamples, TimedEvaluator  # type: ignore[misc, assignment]

    def run(seed: int) -> Outcome:
        words = [f"data.root={data_root}", f"seed={seed}", *BARE, *assignments]
        settings = config.load(recipe, words)
        with tempfile.TemporaryDirectory() as folder:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    loop.train(settings, Path(folder) / "run", False, time.perf_counter())
            except SystemExit as ended:
                raise RuntimeError(f"{recipe} ended with exit code {ended.code}") from ended
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return Outcome(summary["trained_seconds"], moments["scored"] - moments["resident"], summary["accuracy"])

    return run


def bag(checkout: str, data_root: str) -> Run:
    """99991/cifar10-fast-simple, `train.py`. Its own clock has the training alone; it evaluates after every epoch."""
    splits = _images(data_root)
    sys.path.insert(0, checkout)  # train.py imports model.py
    train = imported(checkout, "train")

    def resident(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        (images, labels), (test, answers) = splits["train"], splits["test"]
        images, test = train.preprocess_data(images, device, dtype), train.preprocess_data(test, device, dtype)
        return torch.nn.ReflectionPad2d(4)(images), labels, test, answers

    train.load_cifar10 = resident

    def run(seed: int) -> Outcome:
        said, began = io.StringIO(), time.perf_counter()
        with contextlib.redirect_stdout(said):
            accuracy = train.train(seed=seed)
        synchronize()
        whole = time.perf_counter() - began
        last = next(line.split() for line in reversed(said.getvalue().splitlines()) if line.strip())
        return Outcome(float(last[2]), whole, float(accuracy))

    return run


def airbench(checkout: str, data_root: str, bounded: bool) -> Run:
    """KellerJordan/cifar10-airbench. Its own clock leaves out the evaluations between the epochs."""
    told: dict[str, float] = {}
    code, model = _compiled(checkout, "airbench94_muon", data_root, bounded)
    code.print_training_details = lambda values, **_: told.update(own=values["time_seconds"])

    def run(seed: int) -> Outcome:
        torch.manual_seed(seed)
        began = time.perf_counter()
        accuracy = code.main(seed, model)
        return Outcome(told["own"], time.perf_counter() - began, accuracy)

    return run


PEERS: dict[str, Callable[..., Run]] = {"bag": bag, "airbench": airbench}


def _images(data_root: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10 on the device: uint8 [n, 32, 32, 3] and int64 [n] of each split."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = load("cifar10", Path(data_root), {})
    return {
        name: (torch.as_tensor(images).to(device), torch.as_tensor(labels).long().to(device))
        for name, (images, labels) in (("train", raw.train), ("test", raw.test))
    }


def _compiled(checkout: str, name: str, data_root: str, bounded: bool) -> tuple[Any, Any]:
    """A script and its network, compiled as published, or as `BOUNDED` says. It reads itself by argv[0], and (cifar10/)train.pt."""
    splits = _images(data_root)
    sys.argv[0] = str(Path(checkout).resolve() / f"{name}.py")
    code = imported(checkout, name)
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    for parent in (folder, folder / "cifar10"):
        parent.mkdir(exist_ok=True)
        for split in splits:
            (parent / f"{split}.pt").touch()
    read = torch.load

    def resident(path: Any, *args: Any, **kwargs: Any) -> Any:
        split = Path(str(path)).stem
        if split in splits and str(path).endswith(".pt"):
            images, labels = splits[split]
            return {"images": images, "labels": labels, "classes": [str(number) for number in range(10)]}
        return read(path, *args, **kwargs)

    torch.load = resident  # type: ignore[assignment]
    model = code.CifarNet().cuda().to(memory_format=torch.channels_last)
    if bounded:
        model.compile(options={"triton.cudagraphs": True, "max_autotune_pointwise": True})
    else:
        model.compile(mode="max-autotune")
    return code, model


def imported(checkout: str, name: str) -> Any:
    path = Path(checkout) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


_ready: dict[str, Run] = {}


def _trained(name: str, build: Callable[..., Run], words: tuple[Any, ...], seed: int) -> Outcome:
    """One training, in a process that is this contestant's alone: it builds it the first time."""
    if name not in _ready:
        _ready[name] = build(*words)
    return _ready[name](seed)


def trainings(
    args: argparse.Namespace, names: list[str], deadline: float, failed: dict[str, str]
) -> dict[str, list[Outcome]]:
    """Trainings in turn, each contestant in a process that lives through all of them; the first of each is not counted.

    A contestant that fails, or takes longer than `args.limit` or until `deadline`, goes into `failed` and does not run again.
    """
    found: dict[str, list[Outcome]] = {name: [] for name in names}
    builds: dict[str, tuple[Any, ...]] = {}
    for name in names:
        if name in AGAINST:
            words = [f"device={args.device}", *(ON_GPU if args.device == "cuda" else []), *args.set]
            builds[name] = (ours, (name, str(args.data_root), words))
        else:
            bounded = (args.bounded,) if name == "airbench" else ()
            builds[name] = (PEERS[name], (str(getattr(args, name)), str(args.data_root), *bounded))
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        pools = {name: stack.enter_context(context.Pool(1)) for name in names}
        for number in range(args.runs + 1):
            turn = number % len(names)
            for name in (one for one in names[turn:] + names[:turn] if one not in failed):
                limit = min(args.limit, deadline - time.monotonic())
                if limit <= 0:
                    break
                try:
                    outcome = pools[name].apply_async(_trained, (name, *builds[name], number)).get(limit)
                except multiprocessing.TimeoutError:
                    failed[name] = f"training {number} took longer than {limit:.0f} s (--limit, --seconds)"
                    pools[name].terminate()
                except Exception as error:  # noqa: BLE001 - of another's code; it costs its own row alone
                    failed[name] = f"{error}\n{error.__cause__ or ''}"
                else:
                    print(f"{name} {number or 'warm-up'}: {outcome.whole:.2f} s, {outcome.accuracy:.4f}", flush=True)
                    found[name] += [outcome] if number else []
    return {name: outcomes for name, outcomes in found.items() if outcomes}


def spread(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def gate(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The difference of the mean accuracies in points, and whether it is above −MARGIN with 95 % confidence."""
    points = 100 * (statistics.mean(ours) - statistics.mean(theirs))
    if min(len(ours), len(theirs)) < 2:
        return {"points": points, "at_least": None, "passed": None}
    low = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.90).low
    least = 100 * float(low) if math.isfinite(low) else points  # no spread at all
    return {"points": points, "at_least": least, "passed": least > -MARGIN}


def compared(runs: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """One row for each of ours and each of its peers: how many times faster, by every clock, and the gate."""
    rows = []
    for name, peer in AGAINST.items():
        if name in runs and peer in runs:
            mine, theirs = runs[name], runs[peer]
            # Their own clock has the last evaluation in it, except in the bag of tricks.
            own = [one.own if peer == "bag" else one.whole for one in mine]
            rows.append({
                "ours": name, "peer": peer,
                "own": statistics.median(b.own / a for a, b in zip(own, theirs)),
                "whole": statistics.median(b.whole / a.whole for a, b in zip(mine, theirs)),
                "accuracy": gate([one.accuracy for one in mine], [one.accuracy for one in theirs]),
            })  # fmt: skip
    return rows


def table(runs: dict[str, list[Outcome]], rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':16}{'n':>4}{'own s':>16}{'whole s':>16}{'accuracy %':>16}"]
    for name, outcomes in runs.items():
        cells = [spread([one.own for one in outcomes]), spread([one.whole for one in outcomes])]
        text = "".join(f"{mean:>9.2f} ± {std:4.2f}" for mean, std in cells)
        mean, std = spread([one.accuracy for one in outcomes])
        lines.append(f"{name:16}{len(outcomes):>4}{text}{100 * mean:>9.2f} ± {100 * std:4.2f}")
    for row in rows:
        verdict = {True: "passed", False: "NOT passed", None: "too few runs"}[row["accuracy"]["passed"]]
        ratios = f"own {row['own']:.2f} ×, whole {row['whole']:.2f} ×"
        lines.append(
            f"{row['ours']} against {row['peer']}: {ratios}; {row['accuracy']['points']:+.2f} points, gate {verdict}"
        )
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All runs that fit into `args.seconds`. A contestant that fails is left out."""
    deadline = time.monotonic() + args.seconds
    names = [*args.ours, *(name for name in PEERS if getattr(args, name))]
    failed: dict[str, str] = {}
    runs = trainings(args, names, deadline, failed)
    for name, why in failed.items():
        print(f"{name} FAILED: {why}", file=sys.stderr)
    rows = compared(runs)
    print(table(runs, rows))
    every = {name: [[one.own, one.whole, one.accuracy] for one in outcomes] for name, outcomes in runs.items()}
    notes = [BOUNDED] if args.bounded and args.airbench else []
    for note in notes:
        print(note)
    return {"runs": every, "columns": ["own", "whole", "accuracy"], "compared": rows, "failed": failed, "notes": notes}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--bag", type=Path, help="checkout of 99991/cifar10-fast-simple")
    parser.add_argument("--airbench", type=Path, help="checkout of KellerJordan/cifar10-airbench")
    parser.add_argument("--ours", nargs="+", choices=list(AGAINST), default=list(AGAINST))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3600, help="no further training after so long")
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds of one training, with what it compiles the first time"
    )
    parser.add_argument("--bounded", action="store_true", help="compile airbench in a minute or so, not as published")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="further settings of ours")
    parser.add_argument("--out", type=Path, default=RESULTS / "speedrun.json")
    args = parser.parse_args()
    for name in PEERS:
        checkout = getattr(args, name)
        if checkout and not checkout.is_dir():
            parser.error(f"--{name} {checkout}: no such folder")
        if checkout:
            setattr(args, name, checkout.resolve())
    args.data_root = args.data_root.resolve()
    return args


def main() -> None:
    args = arguments()
    # A run keeps its kernels in its own directory, which is gone after each training here.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "lockstep-kernels"))
    result = measure(args)
    print(f"written to {write('speedrun', {'machine': machine(), **result}, args.out)}")


if __name__ == "__main__":
    main()
