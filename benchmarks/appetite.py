"""python benchmarks/appetite.py [--teraflops 989] [--shares 0.1 0.4]

Where a GPU would wait for its images: a projection. The arithmetic of a training step of each model, counted operator by operator,
and a GPU's peak (default: an H100 SXM's 989 TFLOP/s in bfloat16 without sparsity, NVIDIA's data sheet) give the images a second that it
takes at a share of that peak. Beside it what `loader.py` has recorded on this kind of machine for one rank. No GPU takes part.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import RESULTS
from lockstep.training import models
from lockstep.training.contract import UserError, user_errors

MODELS = [
    ("speedrun", {}, 32), ("bag_of_tricks", {}, 32), ("resnet18", {"stem": "small"}, 32), ("resnet18", {"stem": "stock"}, 224),
]  # fmt: skip
SOURCES = {
    "shards, read": "mapped shards",
    "shards, from the disk": "cold shards",
    "DataLoader, 2 workers": "DataLoader, 2 workers",
}


def flop(name: str, options: dict[str, str], size: int, images: int = 8) -> float:
    """Of forward and backward, an image."""
    model = models.build(name, dict(options), 10)
    with FlopCounterMode(display=False) as counted:
        model(torch.randn(images, 3, size, size)).sum().backward()
    return float(counted.get_total_flops()) / images


def rates(size: int) -> dict[str, float]:
    """Images a second of one rank's loader. Raises `UserError` where none was recorded."""
    path = RESULTS / f"loader-{size}.json"
    try:
        figures = json.loads(path.read_text())["figures"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"{path}: no record: run benchmarks/loader.py --size {size} first") from None
    return {told: figures[name]["median"] for name, told in SOURCES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teraflops", type=float, default=989.0, help="the GPU's peak")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.4], help="of the peak that training reaches")
    args = parser.parse_args()
    print("PROJECTION: no GPU took part")
    for name, options, size in MODELS:
        each = flop(name, options, size)
        found = rates(size)
        print(f"{name} {' '.join(options.values())} at {size}²: {each / 1e9:.2f} GFLOP an image")
        for share in args.shares:
            wanted = args.teraflops * 1e12 * share / each
            of_it = ", ".join(f"{source} {rate / wanted:.1%}" for source, rate in found.items())
            print(f"  at {share:.0%} of the peak: {wanted:,.0f} images/s; one rank's loader gives {of_it}")


if __name__ == "__main__":
    with user_errors():
        main()
