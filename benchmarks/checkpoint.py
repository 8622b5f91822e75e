"""python benchmarks/checkpoint.py [--sizes 10 100 1000] [--rounds 15] [--directory DIR] [--out FILE]

What a checkpoint costs: the stall of an asynchronous save against `torch.save` + fsync of the same state, interleaved;
the throughput of a whole save against plain writing of the same bytes; verification, and resume.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.measure import Figure, Run, figure, interleaved, options, ratios, steady
from lockstep.training.checkpoint.store import Writer, load, newest_verified, verify
from lockstep.training.contract import user_errors


def _state(megabytes: int) -> dict[str, Any]:
    """Ten tensors of float32 that make up `megabytes` (10⁶ bytes)."""
    return {"shared": {f"w{i}": torch.randn(megabytes * 25_000) for i in range(10)}, "ranks": [{"rng": (1, None)}]}


def _torch_save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _plain_write(data: memoryview, path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 8 << 20):
            file.write(data[start : start + (8 << 20)])
        os.fsync(file.fileno())


def measure(megabytes: int, rounds: int, directory: Path) -> tuple[dict[str, Figure], dict[str, list[float]]]:
    """The figures of one size, and the seconds behind them."""
    state = _state(megabytes)
    writer = Writer(directory / "ours", keep=1, keep_best=False)
    step = [0]
    written: list[float] = []
    raw = memoryview(torch.cat(list(state["shared"].values())).numpy()).cast("B")

    def stall() -> None:
        step[0] += 1
        writer.save(step[0], state)

    def settle() -> None:  # the write itself is not part of the stall: training goes on meanwhile
        assert writer._pending is not None
        written.append(writer._pending.result().seconds)

    def ours() -> float:
        began = time.perf_counter()
        stall()
        return time.perf_counter() - began

    warm: list[float] = []
    while not steady(warm):  # the first save allocates the buffer
        warm.append(ours())
        settle()
    written.clear()
    times: dict[str, list[float]] = {"stall": [], "torch.save": [], "plain": []}
    for _ in range(rounds):
        times["stall"].append(ours())
        settle()
        for name, action in (
            ("torch.save", lambda: _torch_save(state, directory / "theirs.pt")),
            ("plain", lambda: _plain_write(raw, directory / "plain")),
        ):
            began = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - began)
    writer.wait()
    newest = directory / "ours" / f"step-{step[0]:08d}"
    reads = interleaved(
        {"verify": lambda: verify(newest), "resume": lambda: load(newest_verified(directory / "ours") or newest)},
        rounds,
    )
    shutil.rmtree(directory / "ours")
    times |= {"written": written, **reads}
    rows = {
        "stall": figure([seconds * 1e3 for seconds in times["stall"]], "ms"),
        "torch.save + fsync": figure([seconds * 1e3 for seconds in times["torch.save"]], "ms"),
        "stall / torch.save + fsync": ratios(times, "stall", "torch.save"),
        "written": figure([megabytes / seconds for seconds in written], "MB/s", "more"),
        "plain": figure([megabytes / seconds for seconds in times["plain"]], "MB/s", "more"),
        "verify": figure(reads["verify"], "s"),
        "verify and load": figure(reads["resume"], "s"),
    }
    return {f"{megabytes} MB, {name}": found for name, found in rows.items()}, times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, rounds=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], help="megabytes of state")
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure; default: the temporary one")
    args = parser.parse_args()
    run = Run("checkpoint", args)
    rows: dict[str, Figure] = {}
    seconds = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for size in args.sizes:
            found, seconds[f"{size} MB"] = measure(size, args.rounds, Path(directory))
            rows |= found
    return run.finish(rows, {"seconds": seconds})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
