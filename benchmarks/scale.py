"""How what surrounds a step grows with the number of ranks: python -m benchmarks.scale [--ranks 2,8,32] [--simulate 1024]

Counts messages, bytes, file reads and CPU-seconds of real gloo ranks on this machine, and of one rank among many in a
simulation, and fits each to a law (docs/explanation/scale.md). The seconds on the clock are those of all ranks on the cores
that there are; `python -m benchmarks.scale_launch` has the start with its imports. A machine that others use is marked.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure, scale_fit, scale_parts, scale_ranks, scale_simulation
from lockstep.training import files
from lockstep.training.data import shards

MEASURES = ("messages", "bytes", "store_messages", "opens", "entries", "hashed", "cpu", "wall")


def real(size: int, timeout: float, local: int | None = None) -> dict[str, Any]:
    """Counts of `size` real ranks by part: in all, and of the rank that does most."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shards.prepare(scale_ranks.settings(root / "data").data)
        began = time.monotonic()
        found = scale_ranks.launch(size, scale_parts.parts, folder, timeout=timeout, local_size=local)
        seconds = time.monotonic() - began
    names = list(dict.fromkeys(name for rank in found for name in rank["phases"]))
    table: dict[str, Any] = {}
    for name in names:
        ranks = [rank["phases"].get(name, {}) for rank in found]
        table[name] = {
            measure: {"total": sum(r.get(measure, 0) for r in ranks), "most": max(r.get(measure, 0) for r in ranks)}
            for measure in MEASURES
        }
    held = {key: int(statistics.median(rank["held"][key] for rank in found)) for key in found[0]["held"]}
    return {"parts": table, "held": held, "wall_seconds": round(seconds, 2)}


def fitted(runs: dict[int, dict[str, Any]], kind: str) -> dict[str, dict[str, str]]:
    """Part → measure → its law. `kind`: `total` of all ranks, or `most` of one rank."""
    sizes = sorted(runs)
    names = [name for name in runs[sizes[0]]["parts"] if all(name in runs[n]["parts"] for n in sizes)]
    laws: dict[str, dict[str, str]] = {}
    for name in names:
        for what in MEASURES:
            points = {n: runs[n]["parts"][name][what][kind] for n in sizes}
            if any(points.values()):
                laws.setdefault(name, {})[what] = str(scale_fit.fit(points))
    return laws


def show(value: dict[str, Any]) -> None:
    runs = {int(n): run for n, run in value["real"].items()}
    for name in runs[min(runs)]["parts"]:
        print(f"\n{name}   [{scale_parts.CAUSES.get(name, '')}]")
        for what in MEASURES:
            points = {n: run["parts"][name][what] for n, run in runs.items() if name in run["parts"]}
            if any(point["total"] for point in points.values()):
                told = ", ".join(f"{n}: {p['total']:.4g} (most {p['most']:.4g})" for n, p in points.items())
                print(f"  {what:15} {told}   total ~ {value['laws_total'][name].get(what, '')}")
    for n, run in runs.items():
        print(f"\n{n} ranks: {run['held']}, {run['wall_seconds']} s in all")
    for name, row in value.get("simulated", {}).items():
        print(f"{name}: {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--ranks", default="2,8,32", help="numbers of real ranks; 128 and 256 take minutes and gigabytes"
    )
    parser.add_argument("--simulate", default="2,8,32,256,1024", help="numbers of ranks in the simulation; empty: none")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if (
        os.environ.get("OMP_NUM_THREADS") != "1"
    ):  # what is forked may have one thread, also of the libraries loaded already
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]], {**os.environ, **one})
    load = measure.Load()
    sizes = [int(text) for text in args.ranks.split(",") if text]
    runs = {size: real(size, args.timeout) for size in sizes}
    value: dict[str, Any] = {
        "real": runs, "laws_total": fitted(runs, "total"), "laws_most": fitted(runs, "most"),
    }  # fmt: skip
    if args.simulate:
        value["simulated"] = scale_simulation.simulate([int(text) for text in args.simulate.split(",")])
    value["machine"] = {**load.about, **load.taken()}
    show(value)
    if value["machine"]["busy"]:
        others = value["machine"]["others"]
        print(f"\nBUSY MACHINE: others took {others:.0%} of its CPU time; counts hold, CPU-seconds and times do not")
    if args.out is not None:
        files.publish(args.out, files.json_text(value, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
