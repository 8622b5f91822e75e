"""Whole trainings to an accuracy: our recipes, and the published CIFAR-10 codes from checkouts that are given by path.

The published code is imported unchanged. Two things around it are ours: its loader reads images that lie on the device
as uint8 already, and its clock is read from what it prints or returns. `python benchmarks/contestants.py NAME CHECKOUT
DATA` is one cold run in a process of its own, without the warm-up run that these scripts do not count.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.cifar_peers import imported
from lockstep.training import config
from lockstep.training.data.loader import Loader
from lockstep.training.data.sources import load
from lockstep.training.evaluate.evaluator import Evaluator
from lockstep.training.parallel.world import detect, joined
from lockstep.training.run import prepare, recipe_attempt
from lockstep.training.run.recipe import train


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training. Seconds by the code's own clock, seconds from uint8 images on the device to the accuracy, and that."""

    own: float
    whole: float
    accuracy: float


BARE = ["evaluate.every=1000", "log.report=false", "checkpoint.every_steps=1000000"]
"""Settings of ours: one evaluation and one checkpoint, at the end."""
Run = Callable[[int], Outcome]
"""Trains once with a seed."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ours(recipe: str, data_root: str, assignments: list[str]) -> Run:
    """`training run RECIPE` in this process. `own` are the steps alone; `whole` is whitening, training and evaluation."""
    moments: dict[str, float] = {}

    class TimedLoader(Loader):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            synchronize()
            moments["resident"] = time.perf_counter()

    class TimedEvaluator(Evaluator):
        def score(self, *args: Any) -> Any:
            found = super().score(*args)
            moments["scored"] = time.perf_counter()
            return found

    prepare.Loader, recipe_attempt.Evaluator = TimedLoader, TimedEvaluator  # type: ignore[misc]

    def run(seed: int) -> Outcome:
        words = [f"data.root={data_root}", f"seed={seed}", *BARE, *assignments]
        settings = config.load(recipe, words)
        with tempfile.TemporaryDirectory() as folder, joined(detect({}), settings.device) as world:
            with contextlib.redirect_stdout(io.StringIO()):
                code = train(settings, world, Path(folder) / "run")
            if code:
                raise RuntimeError(f"{recipe} ended with exit code {code}")
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


def airbench(checkout: str, data_root: str) -> Run:
    """KellerJordan/cifar10-airbench, `airbench94_muon.py`, compiled as published. Its own clock leaves out the
    evaluations between the epochs."""
    code = _script(checkout, "airbench94_muon", data_root)
    model = code.CifarNet().cuda().to(memory_format=torch.channels_last)
    model.compile(mode="max-autotune")
    told: dict[str, float] = {}
    code.print_training_details = lambda values, **_: told.update(own=values["time_seconds"])

    def run(seed: int) -> Outcome:
        torch.manual_seed(seed)
        began = time.perf_counter()
        accuracy = code.main(seed, model)
        return Outcome(told["own"], time.perf_counter() - began, accuracy)

    return run


def hiverge(checkout: str, data_root: str) -> Run:
    """ljbuturovic/cifar10-speedrun, `cifar10_speedrun.py`, compiled as published."""
    code = _script(checkout, "cifar10_speedrun", data_root)
    model = code.CifarNet().cuda().to(memory_format=torch.channels_last)
    model.compile(mode="max-autotune")
    code.print_training_details = lambda *_, **__: None

    def run(seed: int) -> Outcome:
        torch.manual_seed(seed)
        began = time.perf_counter()
        _, _, accuracy, own = code.main(seed, model, "train.pt", "test.pt")
        return Outcome(own, time.perf_counter() - began, accuracy)

    return run


PEERS: dict[str, Callable[[str, str], Run]] = {"bag": bag, "airbench": airbench, "hiverge": hiverge}


def _images(data_root: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """CIFAR-10 on the device: uint8 [n, 32, 32, 3] and int64 [n] of each split."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    raw = load("cifar10", Path(data_root), False, {})
    return {
        name: (torch.as_tensor(images).to(device), torch.as_tensor(labels).long().to(device))
        for name, (images, labels) in (("train", raw.train), ("test", raw.test))
    }


def _script(checkout: str, name: str, data_root: str) -> Any:
    """A script that reads its own source from argv[0], and `cifar10/train.pt` or `train.pt` from where it is started."""
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
    return code


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in PEERS:
        raise SystemExit(f"usage: contestants.py {{{','.join(PEERS)}}} CHECKOUT DATA")
    name, checkout, data_root = sys.argv[1], *(str(Path(word).resolve()) for word in sys.argv[2:])
    with contextlib.redirect_stdout(sys.stderr):
        outcome = PEERS[name](checkout, data_root)(0)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
