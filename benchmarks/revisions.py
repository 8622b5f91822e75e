"""python benchmarks/revisions.py OLD [NEW] [--rounds 31] [--batch 64] [--recipes R …] [--strategies S …] [--out FILE] [--check]

Whole training steps of two checkouts of this project in turn, for a change that must not cost time. OLD and NEW (default: this
one) are folders, e.g. of `git worktree add OLD REVISION`. Each checkout's ranks are processes of their own that stay; a round is one
step of each, and the order turns every round. One rank with all cores, and two ranks with half of them each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import figures
from benchmarks.measure import interleaved
from training.contract import UserError, user_errors
from training.exercises.bench.gang import free_port

HERE = Path(__file__).parents[1]
STEPS = """
import os, sys
import torch
from benchmarks.our_step import our_step
try:
    from training.parallel.world import detect, joined
except ImportError:  # before training/ had rooms
    from training.world import detect, joined

recipe, strategy, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
with joined(detect(os.environ), "cpu") as world:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    step = our_step(recipe, batch, world, strategy)
    for _ in sys.stdin:
        step()
        print("done", flush=True)
"""
"""A rank: one step for each line that it reads."""


class Steps:
    """The ranks of one checkout; a call takes one step. Raises `UserError` where they fail."""

    def __init__(self, checkout: Path, ranks: int, recipe: str, strategy: str, batch: int) -> None:
        self.checkout, self.ranks = checkout, list[subprocess.Popen[str]]()
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        command = [sys.executable, "-c", STEPS, recipe, strategy, str(batch)]
        try:
            for rank in range(ranks):
                own = {**place, "PYTHONPATH": checkout, "RANK": rank, "LOCAL_RANK": rank}
                self.ranks.append(
                    subprocess.Popen(
                        command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                        env={**os.environ, **{name: str(value) for name, value in own.items()}},
                    )
                )  # fmt: skip
        except BaseException:
            self.end()
            raise

    def __call__(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has said why on standard error
                rank.stdin.write("step\n")
                rank.stdin.flush()
        for rank in self.ranks:
            assert rank.stdout is not None
            if not rank.stdout.readline():
                raise UserError(f"{self.checkout}: a rank ended with {rank.wait()}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def compared(
    old: Path, new: Path, ranks: int, recipe: str, strategy: str, batch: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each checkout's step in each round."""
    with contextlib.ExitStack() as stack:
        variants: dict[str, Callable[[], None]] = {}
        for name, checkout in (("old", old), ("new", new)):
            steps = variants[name] = Steps(checkout, ranks, recipe, strategy, batch)
            stack.callback(steps.end)
        return interleaved(variants, rounds, warm_up=3)


def revision(checkout: Path) -> str:
    """The commit of a checkout, with a + where files differ from it."""
    git = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() or "no git checkout"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of the older checkout")
    parser.add_argument("new", type=Path, nargs="?", default=HERE, help="folder of the newer one (default: this one)")
    parser.add_argument("--batch", type=int, default=64, help="images a rank and step; a multiple of 32")
    parser.add_argument("--recipes", nargs="+", default=["bag_of_tricks", "resnet18"])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "flat", "bf16_compress"], help="of the two ranks")
    figures.options(parser, rounds=31)
    args = parser.parse_args()
    with user_errors():
        for checkout in (args.old, args.new):
            if not (checkout / "benchmarks/our_step.py").is_file():
                raise UserError(f"{checkout} is no checkout of this project: it has no benchmarks/our_step.py")
        measured = figures.Run("revisions", args)
        revisions = {"revisions": {"old": revision(args.old), "new": revision(args.new)}}
        rows = {}
        for recipe in args.recipes:
            for ranks, strategy in [(1, "flat"), *((2, name) for name in args.strategies)]:
                times = compared(
                    args.old.resolve(), args.new.resolve(), ranks, recipe, strategy, args.batch, args.rounds
                )
                row = f"{recipe}, 1 rank" if ranks == 1 else f"{recipe}, 2 ranks, {strategy}"
                rows[f"{row}: new / old rate"] = figures.ratios(times, "old", "new", "more")
                medians = {name: statistics.median(seconds) for name, seconds in times.items()}
                print(
                    f"{row}: "
                    + ", ".join(f"{name} {ranks * args.batch / s:.1f} images/s" for name, s in medians.items()),
                    flush=True,
                )
        return measured.finish(rows, revisions)


if __name__ == "__main__":
    raise SystemExit(main())
