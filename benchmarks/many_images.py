"""python benchmarks/many_images.py [--images 100000] [--size 224] [--folder DIR] [--out FILE]

Makes the shards of many JPEG files, reads an epoch of them in batches as a rank does that cannot keep them, and says how
fast that was and the largest memory of all its processes together (PSS: what they share counts once). The files are links to
200 different ones; the shards (15 GB of 100,000 images) are removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.loader import write_images
from benchmarks.measure import machine, write

ROOT = Path(__file__).parents[1]
READ = """
import sys
from pathlib import Path
import torch
from lockstep.training import config
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest
from lockstep.training.parallel.world import World

torch.set_num_threads(1)
settings = config.Config(global_batch_size=64, data=config.Data(resident="never", verify=False))
for batch in Loader(settings, World(), Manifest.read(Path(sys.argv[1])), 64, 1).epoch(0):
    pass
"""


def pss(group: int) -> int:
    """Bytes of all processes of a process group."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(entry.name)) == group:
                text = (entry / "smaps_rollup").read_text()
                found += int(text.partition("\nPss:")[2].split()[0]) << 10
        except (OSError, IndexError):
            continue
    return found


def watched(words: list[str]) -> tuple[float, int]:
    """(seconds, largest PSS in bytes) of a command and all that it starts."""
    began = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        most = 0
        done = threading.Event()
        threading.Thread(target=lambda: (process.wait(), done.set()), daemon=True).start()
        while not done.wait(0.3):
            most = max(most, pss(process.pid))
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}")
    return time.perf_counter() - began, most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--folder", type=Path, help="where there is room")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    about = machine()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        paths = write_images(root, 200, 256)
        for number in range(len(paths), args.images):
            path = paths[number % len(paths)]
            os.link(path, path.with_name(f"{number:06d}.jpg"))
        training = [sys.executable, "-m", "lockstep.training"]
        words = [f"data.root={root}", "data.source=images", f"data.options={{size: {args.size}, held_out: 0.01}}"]
        made, made_pss = watched([*training, "shard", "smoke", "--out", str(root / "shards"), "--set", *words])
        read, read_pss = watched([sys.executable, "-c", READ, str(root / "shards")])
        size = sum(path.stat().st_size for path in (root / "shards").iterdir())
    result = {
        "images": args.images, "bytes": size, "making": {"seconds": made, "pss": made_pss},
        "reading": {"seconds": read, "pss": read_pss}, "machine": about,
    }  # fmt: skip
    print(f"{args.images} images as {args.size}², {size / 1e9:.1f} GB of shards; {about}")
    for name, seconds, most in (("making", made, made_pss), ("reading", read, read_pss)):
        print(
            f"{name:8} {args.images / seconds:7.0f} images/s (start included), at most {most / 1e6:.0f} MB of all processes"
        )
    write("many_images", result, args.out)


if __name__ == "__main__":
    main()
