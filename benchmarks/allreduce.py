"""python benchmarks/allreduce.py [--rounds 15] [--ranks 2] [--batch 64] [--recipe bag_of_tricks] [--no-steps] [--out FILE] [--check]

What gradient communication costs on this machine, over gloo, the ranks taking turns at nothing else:

- the gradients of airbench's network and of the bag of tricks, summed by one call a tensor, in one flat float32 or
  bfloat16 buffer, by torch's coalesced all-reduce, and in the buckets of 25 MB that DDP would use; what it takes to make
  bfloat16 numbers of them and back, and to hand a sum to the thread that sends;
- the *exposed* part of it in a real training step of a recipe under `ddp`, `flat` and `bf16_compress`: the seconds
  from a rank's last own gradient to the sum's arrival, by the run's own step clock (the median over the rounds of the
  rank that waits least, since the others also wait for it).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from benchmarks import figures
from benchmarks.measure import interleaved
from benchmarks.our_step import our_step
from lockstep.training import models
from lockstep.training.contract import user_errors
from lockstep.training.exercises.bench.gang import on_ranks
from lockstep.training.parallel.world import detect, joined

STRATEGIES = ("ddp", "flat", "bf16_compress")
MODELS = ("speedrun", "bag_of_tricks")
BUCKET = 25_000_000
WARM_UP = 3
"""Rounds before the first that counts: the same number on every rank."""
TARGETS = {
    "exposed, flat / ddp": 0.5,
    "exposed, bf16_compress / ddp": 0.4,
    "step, flat / ddp": 1.0,
    "step, bf16_compress / ddp": 1.0,
}


def payload(model: str) -> list[torch.Tensor]:
    return [torch.randn(p.shape) for p in models.build(model, {}, 10).parameters() if p.requires_grad]


def ways(grads: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    small = flat.bfloat16()
    buckets, held = [[]], 0
    for grad in reversed(grads):
        if held >= BUCKET:
            buckets.append([])
            held = 0
        buckets[-1].append(grad.reshape(-1))
        held += grad.numel() * grad.element_size()
    joint = [torch.cat(bucket) for bucket in buckets]

    def convert() -> None:
        small.copy_(flat)
        flat.copy_(small)

    return {
        "per tensor": lambda: [dist.all_reduce(grad) for grad in grads],
        "flat float32": lambda: dist.all_reduce(flat),
        "flat bfloat16": lambda: dist.all_reduce(small),
        "to bfloat16 and back": convert,
        "coalesced": lambda: dist.all_reduce_coalesced(grads),
        "buckets of 25 MB": lambda: [work.wait() for work in [dist.all_reduce(b, async_op=True) for b in joint]],
    }


def handed_over(grads: list[torch.Tensor], rounds: int) -> list[float]:
    """Seconds until an asynchronous all-reduce returns: what stays on the thread that computes. gloo sends from its own."""
    flat, found = torch.cat([grad.reshape(-1) for grad in grads]), []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        work = dist.all_reduce(flat, async_op=True)
        found.append(time.perf_counter() - began)
        work.wait()
    return found


def _rank(args: argparse.Namespace) -> dict[str, Any]:
    size = args.ranks
    with joined(detect(os.environ), "cpu") as world:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
        alone = {
            model: {
                name: [s * 1e3 for s in seconds]
                for name, seconds in interleaved(ways(payload(model)), args.rounds * 3, warm_up=5).items()
            }
            for model in MODELS
        }
        for model in MODELS:
            alone[model]["handed to gloo's thread"] = [
                s * 1e3 for s in handed_over(payload(model), args.rounds * 3 + 5)[5:]
            ]
        exposed: dict[str, list[float]] = {}
        steps: dict[str, list[float]] = {}
        if not args.no_steps:
            runs = {name: our_step(args.recipe, args.batch, world, name) for name in STRATEGIES}
            for number in range(args.rounds + WARM_UP):
                for name, run in runs.items():
                    dist.barrier()
                    times = run()
                    waits: list[Any] = [None] * size
                    dist.all_gather_object(waits, (times["sync_wait"], times["step_duration"]))
                    if number >= WARM_UP:
                        exposed.setdefault(name, []).append(min(wait for wait, _ in waits) * 1e3)
                        steps.setdefault(name, []).append(max(step for _, step in waits) * 1e3)
    return {"alone_ms": alone, "exposed_ms": exposed, "step_ms": steps}


def summary(found: dict[str, Any]) -> dict[str, figures.Figure]:
    """Milliseconds of the collectives, and what is exposed in a step against DDP's, paired round by round."""
    rows = {
        f"{model}, {name}": figures.figure(values, "ms")
        for model, by_name in found["alone_ms"].items()
        for name, values in by_name.items()
    }
    for name, values in found["exposed_ms"].items():
        rows[f"exposed, {name}"] = figures.figure(values, "ms")
        rows[f"step, {name}"] = figures.figure(found["step_ms"][name], "ms")
        if name != "ddp":
            rows[f"exposed, {name} / ddp"] = figures.ratios(found["exposed_ms"], name, "ddp")
            rows[f"step, {name} / ddp"] = figures.ratios(found["step_ms"], name, "ddp")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64, help="images a rank and step; a multiple of 32")
    parser.add_argument("--recipe", choices=MODELS, default="bag_of_tricks", help="whose steps are timed")
    parser.add_argument("--no-steps", action="store_true", help="only the collectives alone")
    args = parser.parse_args()
    name = "allreduce" if args.recipe == "bag_of_tricks" else f"allreduce-{args.recipe}"
    run = figures.Run(name, args)
    found = on_ranks(args.ranks, 1800, _rank, args)[0]
    for model in MODELS:
        print(f"{model}: {sum(tensor.numel() for tensor in payload(model)) * 4 / 1e6:.1f} MB of float32 gradient")
    rows = summary(found)
    for row, target in TARGETS.items():
        if row in rows:
            print(f"{row}: target {target}, {rows[row].meets(target)}")
    about = {"ranks": args.ranks, "recipe": args.recipe, "batch": args.batch}
    return run.finish(rows, {**about, **found})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
