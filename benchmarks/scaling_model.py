"""python benchmarks/scaling_model.py STEP_MS [--model speedrun] [--batch 2000] [--bytes 2] [--table h200]

A projection, not a measurement: seconds of a step on 1 … 64 GPUs, from the step's time on one GPU at each part of the
batch and a published table of all-reduce times.

STEP_MS is a list of `images=milliseconds`, measured on one GPU: `2000=9.1 1000=4.8 500=2.6 250=1.5 125=1.1`. Parts in
between are interpolated; smaller ones than were measured take as long as the smallest, which is what a GPU that is
limited by launches does. Communication is counted as not overlapped at all (the upper bound of a step) and as hidden
behind all but the last bucket (the lower one).

Source of the tables: stas00/ml-engineering, network/benchmarks (all-reduce over NCCL, 8 × H200 in one node, 16 × H100
over InfiniBand).
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import write

TABLES = {
    "h200": [(32e3, 40e-6), (1e6, 46e-6), (4e6, 68e-6), (8e6, 94e-6), (16e6, 134e-6), (32e6, 213e-6)],
    "h100-ib": [(1e6, 88e-6), (10e6, 157e-6)],
}
"""(bytes, seconds) of one blocking all-reduce."""
PARAMETERS = {"speedrun": 1_971_352, "bag_of_tricks": 6_570_880, "resnet18": 11_173_962}
LAST_BUCKET = 0.1
"""Share of the gradient that is ready only when backward ends: the first layers, by bytes, in buckets of the rest."""


def line(points: list[tuple[float, float]], x: float) -> float:
    """Linear between points, flat below the first, and along the last piece above the last."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):  # noqa: RUF007 - a pair of points reads better so
        if x <= x1 or (x1, y1) == points[-1]:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def project(steps: list[tuple[float, float]], batch: int, payload: float, table: str, gpus: int) -> dict[str, float]:
    """{compute, slowest, fastest} seconds of a step of `batch` images on `gpus` GPUs."""
    compute = line(steps, batch / gpus)
    if gpus == 1:
        return {"compute": compute, "slowest": compute, "fastest": compute}
    # The tables are for one group size; a ring's bandwidth term grows with (n − 1) / n, its latency with log₂ n.
    measured = 8 if table == "h200" else 16
    factor = max((gpus - 1) / gpus / ((measured - 1) / measured), math.log2(gpus) / math.log2(measured))
    whole, last = (line(TABLES[table], size) * factor for size in (payload, payload * LAST_BUCKET))
    return {"compute": compute, "slowest": compute + whole, "fastest": compute + last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="IMAGES=MS")
    parser.add_argument("--model", choices=sorted(PARAMETERS), default="speedrun")
    parser.add_argument("--batch", type=int, default=2000, help="global batch, the same at every number of GPUs")
    parser.add_argument("--bytes", type=int, choices=(2, 4), default=4, help="of one gradient element")
    parser.add_argument("--table", choices=sorted(TABLES), default="h200")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        steps = [(float(size), float(ms) / 1e3) for size, ms in (text.split("=") for text in args.steps)]
    except ValueError:
        parser.error("steps are written IMAGES=MILLISECONDS, e.g. 2000=9.1 250=1.5")
    if len(steps) < 2:
        parser.error("give the step's time at two sizes or more")
    payload = PARAMETERS[args.model] * args.bytes
    print(
        f"PROJECTION  {args.model}, global batch {args.batch}, {payload / 1e6:.1f} MB of gradient, table {args.table}"
    )
    print(f"{'GPUs':>5} {'compute ms':>11} {'step ms':>17} {'speed-up':>15}")
    rows = {}
    alone = project(steps, args.batch, payload, args.table, 1)["compute"]
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        row = rows[gpus] = project(steps, args.batch, payload, args.table, gpus)
        times = f"{row['fastest'] * 1e3:.2f} … {row['slowest'] * 1e3:.2f}"
        speed = f"{alone / row['slowest']:.1f} … {alone / row['fastest']:.1f}"
        print(f"{gpus:>5} {row['compute'] * 1e3:>11.2f} {times:>17} {speed:>15}")
    if args.out:
        values = {"projection": True, "steps": args.steps, "batch": args.batch, "rows": rows}
        print(f"written to {write('scaling_model', values, args.out)}")


if __name__ == "__main__":
    main()
