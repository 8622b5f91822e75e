"""python -m benchmarks.scale_launch [--ranks 2,8] [--rounds 7] [--out FILE] [--check]

From the launcher's command to the first step of a Session's loop, in parts, by the number of ranks on this machine: each
part until the last rank has done it. Every rank imports for itself, so with more ranks than cores it is the cores that are
measured: the CPU-seconds a rank beside them say what a node with a core a rank would take.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

from benchmarks import figures
from benchmarks.failure import PARTS, Mark, launched, parts
from lockstep.training.contract import UserError, user_errors

NAMES = {
    "noticed": "processes",
    "imports": "imports",
    "ranks meet": "ranks meet",
    "restored": "prepared",
    "first step": "first step",
}


def start(size: int) -> dict[str, float]:
    """Seconds of each part of one start, and of CPU time a rank. Raises `UserError` where it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    seen = launched(size, 2, "1000", 0, "none")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = parts(Mark("killed", 0, 0, began, 0), seen)
    if found is None:
        raise UserError(f"{size} ranks printed no step: {sorted(seen)[:5]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = {NAMES[name]: found[name] for name in PARTS if name in NAMES}
    return {**seconds, "to the first step": sum(seconds.values()), "CPU-seconds a rank": used / size}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    figures.options(parser, rounds=7)
    parser.add_argument("--ranks", default="2,8", help="numbers of ranks; 32 need 10 GB and minutes on two cores")
    args = parser.parse_args()
    measured = figures.Run("scale_launch", args)
    sizes = [int(text) for text in args.ranks.split(",")]
    rounds: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    start(sizes[0])  # the page cache
    for _ in range(args.rounds):
        for size in sizes:
            rounds[size].append(start(size))
            print(size, " ".join(f"{name} {value:.2f}" for name, value in rounds[size][-1].items()), flush=True)
    rows = {
        f"{size} ranks, {name}": figures.figure([found[name] for found in rounds[size]], "s")
        for size in sizes
        for name in rounds[size][0]
    }
    return measured.finish(rows, {"rounds_by_ranks": rounds})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
