"""python benchmarks/checkpoint.py [--sizes 10 100 1000] [--rounds 5] [--directory DIR] [--out FILE]

What a checkpoint costs: the stall of an asynchronous save against `torch.save` + fsync of the same state, interleaved;
the writer of the tensor file (streams, and hashes meanwhile) against the safetensors library's and a sha256 of what it wrote;
the throughput of a whole save against plain writing of the same bytes; verification, resume, and a seek in the data order.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import save_file

from benchmarks.measure import interleaved, machine, ratio, write
from training import files, manifest
from training.checkpoint import store
from training.checkpoint.store import Writer, load, newest_verified, verify
from training.data import order


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


def _our_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.unlink(missing_ok=True)
    manifest.write_file(path, store._safetensors(tensors))


def _librarys_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """What a checkpoint asks for: on the disk, and with its sha256."""
    path.unlink(missing_ok=True)
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    files.sha256(path)


def measure(megabytes: int, rounds: int, directory: Path) -> dict[str, Any]:
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

    for _ in range(2):  # the first save allocates the buffer, the second finds it warm
        stall()
        settle()
    written.clear()
    stalls, times = [], {"torch.save": [], "plain": []}  # type: ignore[var-annotated]
    for _ in range(rounds):
        stalls.append(ours())
        settle()
        for name, action in (
            ("torch.save", lambda: _torch_save(state, directory / "theirs.pt")),
            ("plain", lambda: _plain_write(raw, directory / "plain")),
        ):
            began = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - began)
    writer.close()
    newest = directory / "ours" / f"step-{step[0]:08d}"
    reads = interleaved(
        {"verify": lambda: verify(newest), "resume": lambda: load(newest_verified(directory / "ours") or newest)},
        rounds,
    )
    tensors = state["shared"]
    writers = interleaved(
        {
            "ours": lambda: _our_file(tensors, directory / "ours.safetensors"),
            "library": lambda: _librarys_file(tensors, directory / "library.safetensors"),
        },
        rounds,
    )
    result = {
        "megabytes": megabytes, "stall_seconds": statistics.median(stalls),
        "torch_save_seconds": statistics.median(times["torch.save"]),
        "stall_over_torch_save": statistics.median(a / b for a, b in zip(stalls, times["torch.save"])),
        "write_mb_per_second": megabytes / statistics.median(written),
        "plain_mb_per_second": megabytes / statistics.median(times["plain"]),
        "verify_seconds": statistics.median(reads["verify"]), "resume_seconds": statistics.median(reads["resume"]),
        "our_file_seconds": statistics.median(writers["ours"]),
        "librarys_file_seconds": statistics.median(writers["library"]), "ours_over_library": ratio(writers, "ours", "library"),
        "verify_over_resume": ratio(reads, "verify", "resume"), "stalls": stalls, "torch_saves": times["torch.save"],
    }  # fmt: skip
    shutil.rmtree(directory / "ours")
    return result


def seek() -> float:
    """Seconds to the batch of step 10⁶ in a data set of ten billion samples."""
    times = []
    for number in range(20):
        began = time.perf_counter()
        order.global_ids(10_000_000_000, number, 3, 1_000_000, 512)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], help="megabytes of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="a folder on the disk to measure; default: the temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about, rows = machine(), []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for size in args.sizes:
            rows.append(measure(size, args.rounds, Path(directory)))
    print(f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {args.rounds} rounds")
    print(
        "    MB   stall ms   torch.save+fsync ms   share   written MB/s   plain MB/s   verify s   resume s"
        "   our file s   library's s   ours/library's"
    )
    for row in rows:
        print(
            f"{row['megabytes']:6d} {row['stall_seconds'] * 1e3:10.1f} {row['torch_save_seconds'] * 1e3:21.1f}"
            f" {row['stall_over_torch_save']:7.3f} {row['write_mb_per_second']:14.0f} {row['plain_mb_per_second']:12.0f}"
            f" {row['verify_seconds']:10.3f} {row['resume_seconds']:10.3f} {row['our_file_seconds']:12.3f}"
            f" {row['librarys_file_seconds']:13.3f} {row['ours_over_library']:16.2f}"
        )
    seconds = seek()
    print(f"seek to step 10⁶: {seconds * 1e3:.2f} ms")
    path = write(
        "checkpoint", {"machine": about, "rounds": args.rounds, "rows": rows, "seek_seconds": seconds}, args.out
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
