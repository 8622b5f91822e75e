"""python benchmarks/loader.py [--images 2000] [--side 256] [--size 128] [--rounds 9] [--out FILE]

Images a second of an epoch's batches: from our shards (read as they lie, and gathered from the memory that a rank keeps them in), and
from torch's DataLoader that decodes the same JPEG files in the same way with 2 workers. And once: making the shards, with 2 processes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Run, figure, interleaved, options, ratios
from lockstep.training import config
from lockstep.training.contract import user_errors
from lockstep.training.data import shard_writer, sources
from lockstep.training.data.batches import Batches, Division, Stored
from lockstep.training.data.shards import Manifest, Samples
from lockstep.training.data.sources.images import decoded
from lockstep.training.parallel.world import World

BATCH = 64


class Decoding(Dataset[tuple[torch.Tensor, int]]):
    """The same images, decoded when they are asked for."""

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths, self.size = paths, size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(decoded(self.paths[index], self.size, self.size).copy()), 0


def write_images(folder: Path, count: int, side: int) -> list[Path]:
    """JPEG files with something like an image's structure, in two classes."""
    generator = np.random.default_rng(0)
    paths = []
    for number in range(count):
        coarse = generator.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
        path = folder / "train" / f"class{number % 2}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)
        paths.append(path)
    return paths


def made(root: Path, size: int, workers: int) -> tuple[Manifest, float]:
    """(the shards, the seconds that they took)"""
    data = config.Data(source="images", root=str(root), options={"size": size, "held_out": 0.02}, workers=workers)
    began = time.perf_counter()
    manifest = shard_writer.write(sources.stream(data), root / f"shards-{workers}", "images")
    return manifest, time.perf_counter() - began


def epoch_of(manifest: Manifest, resident: str) -> Callable[[], None]:
    count = manifest.count("train")
    stored = Stored(Samples.open(manifest, "train"), World(), 0, resident)
    batches = Batches(stored, Division(count, BATCH, World(), 0, uneven="drop"))

    def run() -> None:
        for batch, _ in batches.epoch(0):
            batch.images[batch.rows]  # what a step does first; of a batch that was read it is one more copy

    return run


def decoding(paths: list[Path], size: int, workers: int) -> Callable[[], None]:
    loader = DataLoader(
        Decoding(paths, size), BATCH, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )

    def run() -> None:
        for _ in loader:
            pass

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    for name, default in (("images", 2000), ("side", 256), ("size", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options(parser, rounds=9)
    args = parser.parse_args()
    measured = Run("loader", args)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paths = write_images(root, args.images, args.side)
        manifest, making = made(root, args.size, 2)
        torch.set_num_threads(1)
        variants = {
            "shards, read": epoch_of(manifest, "never"),
            "shards, in memory": epoch_of(manifest, "always"),
            "DataLoader, 2 workers": decoding(paths, args.size, 2),
        }
        images = {
            name: manifest.count("train") // BATCH * BATCH if "shards" in name else args.images for name in variants
        }
        times = interleaved(variants, args.rounds, warm_up=None)
    print(f"{args.images} JPEG files of {args.side}², as {args.size}², batches of {BATCH}")
    rates = {name: [images[name] / seconds for seconds in taken] for name, taken in times.items()}
    rows = {name: figure(values, "images/s", "more") for name, values in rates.items()}
    rows["shards, read / DataLoader, 2 workers"] = ratios(rates, "shards, read", "DataLoader, 2 workers", "more")
    rows["making shards, 2 processes"] = figure([args.images / making], "images/s", "more")
    return measured.finish(rows, {"images": images, "seconds": times})


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
