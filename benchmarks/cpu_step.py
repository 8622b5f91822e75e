"""python benchmarks/cpu_step.py [--rounds 15] [--batch 64] [--no-compile] [--out FILE]

Images a second of one whole training step (augmentation, forward, backward, optimizer, average) on this CPU:
full-width bag_of_tricks and resnet18, eager and compiled; on 2 ranks `flat` against torch's DDP, and `exact` with a part a rank and
with two; and the share of this CPU's sgemm rate, measured in the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.measure import Figure, Run, figure, interleaved, options, ratios
from benchmarks.ranks import on_ranks
from lockstep.training import config
from lockstep.training.contract import user_errors
from lockstep.training.parallel.world import World, detect, joined
from lockstep.training.recipe.loop import Recipe
from lockstep.training.run import run as runs
from lockstep.training.run.recording import WARM_UP
from lockstep.training.session import session_of

FLOP_PER_IMAGE = {"bag_of_tricks": 2.274e9, "resnet18": 3 * 1.11e9, "speedrun": 0.708e9}
"""Forward + backward: the multiply-adds of the convolutions and the linear layer, times two, times three."""
RECIPES = ("bag_of_tricks", "resnet18")
STRATEGIES = ("flat", "ddp", "exact parts=2", "exact parts=4")


class _Measured(Exception):
    """Ends a run without a last checkpoint."""


@contextlib.contextmanager
def our_step(recipe: str, batch: int, world: World, *settings: str) -> Iterator[Callable[[], None]]:
    """The recipe's own step on generated images that lie on the device, with all that a run does between two steps.

    Args:
        batch: images of this rank.
        settings: with `capture=auto` the step is recorded already on a GPU. Raises `RuntimeError` where it cannot be.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(_Measured))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        size = batch * world.size
        chosen = config.load(recipe, [
            f"global_batch_size={size}", "epochs=1000000", "checkpoint.every_steps=1000000",
            "data.source=synthetic", f"data.options={{n: {32 * size}, n_test: 64}}", f"data.root={folder}",
            "data.resident=always", "log.format=json", *settings,
        ])  # fmt: skip
        start = runs.Run(Path(folder) / "run", chosen, handle_signals=False, world=world)
        run = stack.enter_context(session_of(start))
        trained = Recipe(run, chosen, start)
        batches = (batch for _ in run.epochs(chosen.epochs) for batch in run.batches(trained.batches))
        stream = torch.cuda.current_stream() if world.device.type == "cuda" else None

        def step() -> None:
            torch.use_deterministic_algorithms(chosen.deterministic or chosen.exact)
            with torch.cuda.stream(stream):  # its own, whatever was opened since
                trained.step(next(batches))

        if chosen.capture == "auto" and world.device.type == "cuda":
            for _ in range(WARM_UP + 1):
                step()
            recorder = run._started().step.recorder
            if recorder is None or recorder.failure:  # eager times are not to be published as recorded ones
                raise RuntimeError(recorder.failure if recorder else "the steps of this recipe cannot be recorded")
        yield step
        raise _Measured


def sgemm(size: int = 2048) -> Callable[[], None]:
    a, b = torch.randn(size, size), torch.randn(size, size)
    return lambda: torch.mm(a, b)  # type: ignore[return-value]


def one_process(batch: int, rounds: int, compile_too: bool) -> dict[str, list[float]]:
    """Seconds of each variant in each round."""
    with joined(detect({}), "cpu") as world, contextlib.ExitStack() as stack:
        variants: dict[str, Callable[[], None]] = {"sgemm": sgemm()}
        for recipe in RECIPES:
            for form in ("eager", "compiled")[: 1 + compile_too]:
                own = our_step(recipe, batch, world, "sync.name=flat", f"compile={form == 'compiled'}")
                variants[f"{recipe} {form}"] = stack.enter_context(own)
        return interleaved(variants, rounds, warm_up=None if rounds > 1 else 0)


def _rank(batch: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with joined(detect(os.environ), "cpu") as world:
        for recipe in RECIPES:
            with contextlib.ExitStack() as stack:
                words = {name: f"sync.name={name.replace(' ', ' sync.options.')}".split() for name in STRATEGIES}
                variants = {name: stack.enter_context(our_step(recipe, batch, world, *words[name])) for name in words}
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
        for name in set(times) - {"ddp"}:
            rows[f"2 ranks, {recipe}, {name} against ddp"] = ratios(times, "ddp", name, "more")
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
