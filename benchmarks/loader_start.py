"""python benchmarks/loader_start.py [--gigabytes 1 10 100] [--out FILE]

The longest start of a run that reads shards: until they are verified, by one rank and by two that share them, and from there to the first
batch of a loader that maps them. The shards are sparse files of zeros, 224² images, 1 GB each: nothing comes from a disk, so
this is the sha256 and the page cache; a disk that reads slower than that decides instead. Each size once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import Load, forget, write
from lockstep.training import config
from lockstep.training.data import shards
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest, Shard
from lockstep.training.parallel.world import World

SHAPE = (224, 224, 3)
COUNT = 10**9 // (224 * 224 * 3)
"""Images of a shard."""


def sparse(path: Path) -> None:
    """A shard of black images of class 0."""
    labels, pixels = 8 * COUNT, COUNT * SHAPE[0] * SHAPE[1] * SHAPE[2]
    about = {
        "labels": {"dtype": "I64", "shape": [COUNT], "data_offsets": [0, labels]},
        "images": {"dtype": "U8", "shape": [COUNT, *SHAPE], "data_offsets": [labels, labels + pixels]},
    }
    header = json.dumps(about).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + labels + pixels)


def made(folder: Path, number: int) -> Manifest:
    """So many shards of the same bytes, and one to test."""
    names = [f"train-{index:05d}.safetensors" for index in range(number)]
    sparse(folder / names[0])
    with (folder / names[0]).open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
    for name in (*names[1:], "test-00000.safetensors"):
        sparse(folder / name)
    splits = {
        "train": [Shard(name, COUNT, sha) for name in names],
        "test": [Shard("test-00000.safetensors", COUNT, sha)],
    }
    return Manifest(folder, "images", ["black"], SHAPE, splits)


def verified(manifest: Manifest, parts: int) -> float:
    """Seconds, from a cold page cache, until `parts` ranks have verified them together.

    Threads are as good as processes: sha256 runs without the GIL.
    """
    forget(manifest.directory)
    began = time.perf_counter()
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(lambda part: shards.verify(manifest, ("train",), part, parts), range(parts)))
    return time.perf_counter() - began


def first_batch(manifest: Manifest) -> float:
    settings = config.Config(global_batch_size=64, data=config.Data(resident="never"))
    began = time.perf_counter()
    batches = Loader(settings, World(), manifest, 64, 1, verified=True).epoch(0)
    next(batches)
    seconds = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--out", type=Path, help="the file of the result (default: in benchmarks/results)")
    args = parser.parse_args()
    load, rows = Load(), {}
    for number in args.gigabytes:
        folder = Path(tempfile.mkdtemp())
        try:
            manifest = made(folder, number)
            # Not counted: a virtual machine gets its memory from the host when it is first touched, which takes longer than sha256.
            verified(manifest, 2)
            rows[number] = {
                "verify, 1 rank": verified(manifest, 1), "verify, 2 ranks": verified(manifest, 2),
                "map and first batch": first_batch(manifest),
            }  # fmt: skip
        finally:
            shutil.rmtree(folder)
        print(f"{number} GB: " + ", ".join(f"{name} {value:.2f} s" for name, value in rows[number].items()), flush=True)
    about = {**load.about, **load.taken()}
    print(f"written to {write('loader_start', {'machine': about, 'seconds': rows}, args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
