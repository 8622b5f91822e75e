"""python benchmarks/cpu_step.py [--rounds 15] [--batch 64] [--no-compile] [--out FILE]

Images a second of one whole training step (augmentation, forward, backward, optimizer, average) on this CPU:
full-width bag_of_tricks and resnet18, eager and compiled; on 2 ranks `flat` against torch's DDP; and the share of
this CPU's sgemm rate, measured in the same rounds.
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
from lockstep.training.cudagraph import CapturedTrainer, obstacle
from lockstep.training.data.loader import Batch
from lockstep.training.trainer import Trainer

from benchmarks.measure import Figure, Run, figure, interleaved, options, ratios
from benchmarks.ranks import on_ranks
from lockstep.training import config, optim, sync
from lockstep.training.checkpoint.state import Cursor, TrainState
from lockstep.training.contract import user_errors
from lockstep.training.models import batch_multiple, build
from lockstep.training.models.arithmetic import real_type
from lockstep.training.observe.clock import Times, step_clock
from lockstep.training.optim.ema import Ema
from lockstep.training.parallel.world import World, detect, joined

FLOP_PER_IMAGE = {"bag_of_tricks": 2.274e9, "resnet18": 3 * 1.11e9, "speedrun": 0.708e9}
"""Forward + backward: the multiply-adds of the convolutions and the linear layer, times two, times three."""
RECIPES = ("bag_of_tricks", "resnet18")


def our_step(
    recipe: str, batch: int, world: World, strategy: str, compiled: bool = False, extra: list[str] | None = None
) -> Callable[[], Times]:
    """The recipe's own step, from uint8 images on the device to averaged weights; gives back the phases' seconds.

    Args:
        batch: images of this rank.
        extra: settings; with `capture=auto` the step is recorded, and has to run on `capture_stream`. Raises
            `RuntimeError`, here or in the step that was to be recorded, where it cannot be.
    """
    torch.manual_seed(0)
    settings = config.load(recipe, [f"global_batch_size={batch * world.size}", f"sync.name={strategy}", *(extra or [])])
    device = world.device
    model = build(settings.model, settings.model_options, 10).to(device, real_type(settings.precision))
    model = model.to(memory_format=torch.channels_last) if settings.channels_last else model
    synchroniser = sync.build(settings.sync)
    network = synchroniser.wrap(model, world, torch.randn(batch, 3, 32, 32, device=device))
    network = torch.compile(network) if compiled else network
    optimizer = synchroniser.make_optimizer(
        lambda parameters: optim.build(parameters, settings, batch * world.size, model)
    )
    ema = Ema(model, settings.ema.decay, settings.ema.every) if settings.ema.decay else None
    losses = torch.zeros(2, dtype=torch.float64, device=device)
    state = TrainState(world, model.train(), optimizer, synchroniser, ema, Cursor(), step_clock(device), losses, {})
    steps = {"batch_multiple": batch_multiple(model), "steps_per_epoch": 1000}
    trainer = Trainer(settings, state, network, **steps)
    if settings.capture == "auto":
        if reason := obstacle(settings, state):
            raise RuntimeError(reason)
        trainer = CapturedTrainer(settings, state, network, _refuse, None, **steps)
    images = torch.randint(0, 256, (max(4096, batch + 1), 32, 32, 3), dtype=torch.uint8).to(device)
    rows = torch.arange(batch, device=device)
    part = Batch(images, rows, rows, torch.randint(0, 10, (batch,)).to(device), batch * world.size)

    def run() -> Times:
        state.clock.begin()
        state.clock.data_ready()
        trainer.step(part)
        trainer.update_average()
        state.cursor.step = (state.cursor.step + 1) % 1000
        return state.clock.end()

    return run


def _refuse(why: str) -> None:
    """Eager times are not to be published as recorded ones."""
    raise RuntimeError(why)


def sgemm(size: int = 2048) -> Callable[[], None]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: torch.mm(a, b)  # type: ignore[return-value]


def one_process(batch: int, rounds: int, compile_too: bool) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    with joined(detect({}), "cpu") as world:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        variants: dict[str, Callable[[], Any]] = {"sgemm": sgemm()}
        for recipe in RECIPES:
            variants[f"{recipe} eager"] = our_step(recipe, batch, world, "flat")
            if compile_too:
                variants[f"{recipe} compiled"] = our_step(recipe, batch, world, "flat", compiled=True)
        return interleaved(variants, rounds, warm_up=None if rounds > 1 else 0)


def _rank(batch: int, rounds: int) -> dict[str, Any]:
    with joined(detect(os.environ), "cpu") as world:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        found = {}
        for recipe in RECIPES:
            variants = {name: our_step(recipe, batch, world, name) for name in ("flat", "ddp")}
            found[recipe] = interleaved(variants, rounds, warm_up=3 if rounds > 1 else 0)
    return found


def summary(batch: int, one: dict[str, list[float]], two: dict[str, dict[str, list[float]]]) -> dict[str, Figure]:
    rows = {"sgemm 2048": figure([2 * 2048**3 / seconds / 1e9 for seconds in one["sgemm"]], "GFLOP/s", "more")}
    for name, times in one.items():
        if name != "sgemm":
            flop = FLOP_PER_IMAGE[next(recipe for recipe in RECIPES if recipe in name)] * batch
            rows[name] = figure([batch / seconds for seconds in times], "images/s", "more")
            shares = [flop / seconds / (2 * 2048**3 / sgemm) for seconds, sgemm in zip(times, one["sgemm"])]
            rows[f"{name}, share of sgemm"] = figure(shares, "", "more")
    for recipe, times in two.items():
        for name, seconds in times.items():
            rows[f"2 ranks, {recipe}, {name}"] = figure([2 * batch / s for s in seconds], "images/s", "more")
        rows[f"2 ranks, {recipe}, flat against ddp"] = ratios(times, "ddp", "flat", "more")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, rounds=15)
    parser.add_argument("--batch", type=int, default=64, help="images a rank and step; a multiple of 32")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    run = Run("cpu_step", args)
    one = one_process(args.batch, args.rounds, not args.no_compile)
    two = on_ranks(2, 1800, _rank, args.batch, args.rounds)[0]
    return run.finish(summary(args.batch, one, two), {"batch": args.batch, "one_process": one, "two_ranks": two})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
