"""python benchmarks/revisions.py OLD [NEW] [--rounds 32] [--starts 4] [--batch 64] [--recipes R …] [--strategies S …] [--out FILE]

Whole training steps of two checkouts of this project in turn, for a change that must not cost time. OLD and NEW (default: this
one) are folders, e.g. of `git worktree add OLD REVISION`; the same folder twice shows the noise. Each checkout's ranks are
processes of their own; a round is one step of each, and the order turns every round. The processes are started anew a few
times, since where the memory of a process lies makes it some per cent faster or slower to its end. One rank with all cores, and
two ranks with half of them each.
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
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import figures
from benchmarks.measure import interleaved
from lockstep.training.contract import UserError, user_errors
from lockstep.training.exercises.bench.gang import free_port

HERE = Path(__file__).parents[1]
Times: TypeAlias = dict[str, list[float]]
STEPS = """
import os, sys
import torch
from benchmarks.our_step import our_step
try:
    from lockstep.training.parallel.memory import keep_freed
    from lockstep.training.parallel.world import detect, joined
except ImportError:
    try:  # before everything was imported as lockstep
        from training.parallel.memory import keep_freed
        from training.parallel.world import detect, joined
    except ImportError:  # before training/ had rooms
        from training.memory import keep_freed
        from training.world import detect, joined

recipe, strategy, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
with joined(detect(os.environ), "cpu") as world:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    keep_freed()  # as a run on a CPU does
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
    checkouts: dict[str, Path], ranks: int, recipe: str, strategy: str, batch: int, rounds: int, starts: int
) -> list[Times]:
    """Of each start of the processes: seconds of each checkout's step in each of its rounds."""
    found = []
    for start in range(starts):
        turned = dict(sorted(checkouts.items(), reverse=start % 2 == 0))  # the first one to be started changes, too
        found.append(_of_a_start(turned, ranks, recipe, strategy, batch, -(-rounds // starts)))
    return found


def _of_a_start(checkouts: dict[str, Path], ranks: int, recipe: str, strategy: str, batch: int, rounds: int) -> Times:
    with contextlib.ExitStack() as stack:
        variants: dict[str, Callable[[], None]] = {}
        for name, checkout in checkouts.items():
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
    parser.add_argument(
        "--starts", type=int, default=4, help="the processes are started so often; the rounds are divided"
    )
    figures.options(parser, rounds=32)
    args = parser.parse_args()
    with user_errors():
        for checkout in (args.old, args.new):
            if not (checkout / "benchmarks/our_step.py").is_file():
                raise UserError(f"{checkout} is no checkout of this project: it has no benchmarks/our_step.py")
        measured = figures.Run("revisions", args)
        revisions = {"revisions": {"old": revision(args.old), "new": revision(args.new)}}
        rows: dict[str, figures.Figure] = {}
        of_starts: dict[str, list[float]] = {}
        checkouts = {"old": args.old.resolve(), "new": args.new.resolve()}
        for recipe in args.recipes:
            for ranks, strategy in [(1, "flat"), *((2, name) for name in args.strategies)]:
                starts = compared(checkouts, ranks, recipe, strategy, args.batch, args.rounds, args.starts)
                times = {name: [seconds for start in starts for seconds in start[name]] for name in checkouts}
                ratio_of = [round(figures.ratios(start, "old", "new").median, 4) for start in starts]
                row = f"{recipe}, 1 rank" if ranks == 1 else f"{recipe}, 2 ranks, {strategy}"
                of_starts[row] = ratio_of
                rows[f"{row}: new / old rate"] = figures.ratios(times, "old", "new", "more")
                medians = {name: statistics.median(seconds) for name, seconds in times.items()}
                print(
                    f"{row}: "
                    + ", ".join(f"{name} {ranks * args.batch / s:.1f} images/s" for name, s in medians.items())
                    + f"; new / old in each start {ratio_of}",
                    flush=True,
                )
        return measured.finish(rows, {**revisions, "ratio of each start": of_starts})


if __name__ == "__main__":
    raise SystemExit(main())
