"""python benchmarks/cpu_step.py [--rounds 15] [--batch 64] [--no-compile] [--out FILE] [--check]

Images a second of one whole training step (augmentation, forward, backward, optimizer, average) on this CPU:
full-width bag_of_tricks and resnet18, eager and compiled, beside a plain NCHW float32 step of the same network; on
2 ranks `flat` against torch's DDP; and the share of this CPU's sgemm rate, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import figures
from benchmarks.measure import interleaved
from benchmarks.our_step import FLOP_PER_IMAGE, our_step
from lockstep.training.contract import user_errors
from lockstep.training.exercises.bench.gang import on_ranks
from lockstep.training.parallel.world import detect, joined

RECIPES = ("bag_of_tricks", "resnet18")


class PlainBagOfTricks(nn.Module):
    """The same network as its publication writes it: ghost batch norm with one running mean a split, no reordering."""

    class Norm(nn.BatchNorm2d):
        def __init__(self, channels: int, splits: int = 16) -> None:
            super().__init__(channels)
            self.weight.requires_grad_(False)
            self.splits = splits
            self.register_buffer("running_mean", torch.zeros(channels * splits))
            self.register_buffer("running_var", torch.ones(channels * splits))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, c, h, w = x.shape
            x = x.view(-1, c * self.splits, h, w)
            weight, bias = self.weight.repeat(self.splits), self.bias.repeat(self.splits)
            return F.batch_norm(x, self.running_mean, self.running_var, weight, bias, True, 0.1, 1e-5).view(n, c, h, w)

    def __init__(self, splits: int) -> None:
        super().__init__()

        def block(fan_in: int, fan_out: int, kernel: int = 3, pool: bool = False) -> nn.Sequential:
            conv = nn.Conv2d(fan_in, fan_out, kernel, padding=kernel // 2, bias=False)
            return nn.Sequential(conv, *([nn.MaxPool2d(2)] if pool else []), self.Norm(fan_out, splits), nn.CELU(0.3))

        self.whitening = nn.Conv2d(3, 27, 3, padding=1, bias=False).requires_grad_(False)
        self.stem, self.stage1 = block(27, 64, 1), block(64, 128, pool=True)
        self.residual1 = nn.Sequential(block(128, 128), block(128, 128))
        self.stage2, self.stage3 = block(128, 256, pool=True), block(256, 512, pool=True)
        self.residual3 = nn.Sequential(block(512, 512), block(512, 512))
        self.head = nn.Linear(512, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage1(self.stem(self.whitening(x)))
        x = self.stage3(self.stage2(x + self.residual1(x)))
        x = x + self.residual3(x)
        return self.head(F.max_pool2d(x, 4).flatten(1)) * 0.125


def plain_step(batch: int) -> Callable[[], None]:
    """Forward, backward and torch's SGD with Nesterov momentum, on a batch that is ready in memory."""
    torch.manual_seed(0)
    model = PlainBagOfTricks(splits=max(batch // 32, 1))
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, momentum=0.9, nesterov=True
    )
    x, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels, label_smoothing=0.2, reduction="sum").backward()
        optimizer.step()

    return step


def sgemm(size: int = 2048) -> Callable[[], None]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: torch.mm(a, b)  # type: ignore[return-value]


def one_process(batch: int, rounds: int, compile_too: bool) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    with joined(detect({}), "cpu") as world:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        variants: dict[str, Callable[[], Any]] = {"sgemm": sgemm(), "plain bag_of_tricks": plain_step(batch)}
        for recipe in RECIPES:
            variants[f"{recipe} eager"] = our_step(recipe, batch, world, "flat")
            if compile_too:
                variants[f"{recipe} compiled"] = our_step(recipe, batch, world, "flat", compiled=True)
        return interleaved(variants, rounds, warm_up=None)


def _rank(batch: int, rounds: int) -> dict[str, Any]:
    with joined(detect(os.environ), "cpu") as world:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        found = {}
        for recipe in RECIPES:
            variants = {name: our_step(recipe, batch, world, name) for name in ("flat", "ddp")}
            found[recipe] = interleaved(variants, rounds, warm_up=3)
    return found


def summary(
    batch: int, one: dict[str, list[float]], two: dict[str, dict[str, list[float]]]
) -> dict[str, figures.Figure]:
    rows = {"sgemm 2048": figures.figure([2 * 2048**3 / seconds / 1e9 for seconds in one["sgemm"]], "GFLOP/s", "more")}
    for name, times in one.items():
        if name != "sgemm":
            flop = FLOP_PER_IMAGE[next(recipe for recipe in RECIPES if recipe in name)] * batch
            rows[name] = figures.figure([batch / seconds for seconds in times], "images/s", "more")
            shares = [flop / seconds / (2 * 2048**3 / sgemm) for seconds, sgemm in zip(times, one["sgemm"])]
            rows[f"{name}, share of sgemm"] = figures.figure(shares, "", "more")
    rows["bag_of_tricks, ours against plain"] = figures.ratios(
        one, "plain bag_of_tricks", "bag_of_tricks eager", "more"
    )
    for recipe, times in two.items():
        for name, seconds in times.items():
            rows[f"2 ranks, {recipe}, {name}"] = figures.figure([2 * batch / s for s in seconds], "images/s", "more")
        rows[f"2 ranks, {recipe}, flat against ddp"] = figures.ratios(times, "ddp", "flat", "more")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=15)
    parser.add_argument("--batch", type=int, default=64, help="images a rank and step; a multiple of 32")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    run = figures.Run("cpu_step", args)
    one = one_process(args.batch, args.rounds, not args.no_compile)
    two = on_ranks(2, 1800, _rank, args.batch, args.rounds)[0]
    return run.finish(summary(args.batch, one, two), {"batch": args.batch, "one_process": one, "two_ranks": two})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
