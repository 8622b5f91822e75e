"""python benchmarks/cpu_peers.py [--bag CHECKOUT] [--airbench CHECKOUT] [--rounds 5] [--out FILE]

One whole training step (augmentation, forward, backward, optimizer, average) of our recipes on this CPU, beside the
published codes' own steps at their own batch sizes: bag_of_tricks at 512 against 99991/cifar10-fast-simple, speedrun at
2000 against KellerJordan/cifar10-airbench. Checkouts are given by path and run unchanged. Every variant has a process of
its own, because how freed memory is kept is process-wide; they take turns, so only one computes at a time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import cifar_peers
from benchmarks.cpu_step import sgemm
from benchmarks.measure import Worker, interleaved, machine, ratio, write
from benchmarks.our_step import FLOP_PER_IMAGE, our_step
from lockstep.training.parallel import memory
from lockstep.training.parallel.world import detect, joined

_OPEN: list[Any] = []


def ours(recipe: str, batch: int, threads: int, extra: list[str]) -> Callable[[], Any]:
    memory.keep_freed()  # as a run on a CPU does
    world = joined(detect({}), "cpu")
    _OPEN.append(world)  # the group stays open for as long as the worker lives
    step = our_step(recipe, batch, world.__enter__(), "flat", extra=extra)
    torch.set_num_threads(threads)
    return step


def _sgemm(threads: int) -> Callable[[], None]:
    torch.set_num_threads(threads)
    return sgemm()


def compare(recipe: str, batch: int, peer: Callable[..., Any], checkout: str | None, rounds: int) -> dict[str, Any]:
    threads = len(os.sched_getaffinity(0))
    workers = {"sgemm": Worker(_sgemm, threads)}
    for name, setting in (("ours, NCHW", "channels_last=false"), ("ours, channels_last", "channels_last=true")):
        workers[name] = Worker(ours, recipe, batch, threads, [setting])
    if checkout:
        workers["peer"] = Worker(peer, checkout, batch, threads)
    try:
        times = interleaved(workers, rounds)
    finally:
        for worker in workers.values():
            worker.close()
    gflops = 2 * 2048**3 / statistics.median(times["sgemm"]) / 1e9
    rows = {
        name: {
            "images_per_second": batch / statistics.median(seconds),
            "share_of_sgemm": batch / statistics.median(seconds) * FLOP_PER_IMAGE[recipe] / 1e9 / gflops,
            "speed_against_peer": ratio(times, "peer", name) if "peer" in times else None,
        }
        for name, seconds in times.items()
        if name != "sgemm"
    }
    return {"batch": batch, "sgemm_gflops": gflops, "rows": rows, "seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bag", help="checkout of 99991/cifar10-fast-simple")
    parser.add_argument("--airbench", help="checkout of KellerJordan/cifar10-airbench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, help="instead of the published 512 and 2000")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = machine()
    found = {
        "bag_of_tricks": compare("bag_of_tricks", args.batch or 512, cifar_peers.bag_of_tricks, args.bag, args.rounds),
        "speedrun": compare("speedrun", args.batch or 2000, cifar_peers.airbench, args.airbench, args.rounds),
    }
    print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {args.rounds} rounds")
    for recipe, result in found.items():
        print(f"{recipe}, batch {result['batch']}, sgemm {result['sgemm_gflops']:.0f} GFLOP/s")
        for name, row in result["rows"].items():
            against = f"{row['speed_against_peer']:.3f} × the peer" if row["speed_against_peer"] else ""
            print(
                f"  {name:22} {row['images_per_second']:7.1f} images/s {row['share_of_sgemm']:5.2f} of sgemm  {against}"
            )
    print(f"written to {write('cpu_peers', {'machine': about, 'rounds': args.rounds, **found}, args.out)}")


if __name__ == "__main__":
    main()
