"""python benchmarks/object_store.py URL [--sizes 10 100] [--rounds 9] [--out FILE]

What `checkpoint.to` costs against a plain copy, with the same library, of the same bytes: the stall of a save while the one before is
sent, and without a bucket; sending one until it is read back and committed; a whole save (to the disk, then that); and the start of a node
that has nothing. URL: s3://…, gs://…, az://…; an empty prefix.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.checkpoint import _state
from benchmarks.measure import Figure, Run, figure, options, ratios
from lockstep.training.checkpoint.object_store import ObjectStore
from lockstep.training.checkpoint.store import Writer
from lockstep.training.contract import user_errors
from lockstep.training.run.saver import Sender


def measure(megabytes: int, rounds: int, url: str, directory: Path) -> tuple[dict[str, Figure], dict[str, list[float]]]:
    """The figures of one size, and the seconds behind them."""
    state, place = _state(megabytes), f"{url}/{megabytes}"
    run_dir = directory / str(megabytes)
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "run.yaml").write_text("{}\n")
    objects = _acquired(place, run_dir, fresh=True)
    writer, sender = Writer(run_dir / "checkpoints", 1, False), Sender(objects, run_dir / "checkpoints")
    alone = Writer(directory / f"alone-{megabytes}", 1, False)
    names = ("stall", "stall, disk", "sent", "saved", "plain send", "start", "plain fetch")
    times: dict[str, list[float]] = {name: [] for name in names}

    def clock(name: str, began: float) -> None:
        times[name].append(time.perf_counter() - began)

    for step in range(2, 2 * rounds + 4, 2):  # the first save allocates the buffer
        writer.save(step - 1, state).result()
        before = sender.send(step - 1)
        began = time.perf_counter()
        written = writer.save(step, state)
        clock("stall", began)
        before.result()
        written.result()
        began = time.perf_counter()
        assert objects.commit(run_dir / f"checkpoints/step-{step:08d}")
        clock("sent", began)
        times["saved"].append(times["sent"][-1] + written.result().seconds)
        began = time.perf_counter()
        written = alone.save(step, state)
        clock("stall, disk", began)
        written.result()
        file = run_dir / f"checkpoints/step-{step:08d}/state.safetensors"
        began = time.perf_counter()
        objects._obstore.put(objects._store, "plain", file)
        clock("plain send", began)
        began = time.perf_counter()
        with (directory / "plain").open("wb") as copy:
            for piece in objects._obstore.get(objects._store, "plain").stream(min_chunk_size=16 << 20):
                copy.write(piece)
        clock("plain fetch", began)
        with tempfile.TemporaryDirectory(dir=directory) as empty:
            began = time.perf_counter()
            _acquired(place, Path(empty))
            clock("start", began)
            objects.acquire(False, print)
    times = {name: found[1:] for name, found in times.items()}
    rows = {
        "stall": figure([seconds * 1e3 for seconds in times["stall"]], "ms"),
        "stall / without a bucket": ratios(times, "stall", "stall, disk"),
        "send": figure([megabytes / seconds for seconds in times["sent"]], "MB/s", "more"),
        "send / plain send": ratios(times, "plain send", "sent", "more"),
        "save": figure([megabytes / seconds for seconds in times["saved"]], "MB/s", "more"),
        "save / plain send": ratios(times, "plain send", "saved", "more"),
        "start": figure([megabytes / seconds for seconds in times["start"]], "MB/s", "more"),
        "start / plain fetch": ratios(times, "plain fetch", "start", "more"),
    }
    return {f"{megabytes} MB, {name}": found for name, found in rows.items()}, times


def _acquired(url: str, run_dir: Path, fresh: bool = False) -> ObjectStore:
    objects = ObjectStore(url)
    objects.check(run_dir, fresh)
    newest = objects.acquire(fresh, print)
    assert fresh or newest is not None
    return objects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    options(parser, rounds=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100], help="megabytes of state")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as a rank has on the CPU
    run = Run("object_store", args)
    rows: dict[str, Figure] = {}
    seconds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for size in args.sizes:
            found, seconds[f"{size} MB"] = measure(size, args.rounds, args.url, Path(directory))
            rows |= found
    return run.finish(rows, {"seconds": seconds})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
