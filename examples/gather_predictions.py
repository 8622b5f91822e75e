"""torchrun --standalone --nproc-per-node 3 examples/gather_predictions.py OUT.json

Each rank classifies its own part of scikit-learn's digits; rank 0 gathers the parts, which are of unequal length, and
writes all predictions in the order of the images.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from lockstep.training.data import sources
from lockstep.training.data.order import bounds
from lockstep.training.exercises.collectives import all_gather, gather_objects
from lockstep.training.parallel.world import detect, joined


def main(out: Path) -> None:
    raw = sources.load("digits", Path(), False, {})
    images, tests = (torch.from_numpy(split[0]).float().flatten(1) for split in (raw.train, raw.test))
    labels = torch.from_numpy(raw.train[1])
    means = torch.stack([images[labels == digit].mean(0) for digit in range(10)])  # the nearest mean is the prediction
    with joined(detect(os.environ), "cpu") as world:
        low, high = bounds(len(tests), world.rank, world.size)
        mine = torch.cdist(tests[low:high], means).argmin(1)
        parts = gather_objects({"rank": world.rank, "low": low, "predictions": mine}, world)
        everywhere = torch.cat(all_gather(mine))  # the same as tensors, on every rank
        if parts is not None:
            predictions = torch.cat([part["predictions"] for part in parts])
            assert torch.equal(predictions, everywhere)
            accuracy = float((predictions == torch.from_numpy(raw.test[1])).double().mean())
            sizes = [len(part["predictions"]) for part in parts]
            out.write_text(
                json.dumps({"accuracy": accuracy, "parts": sizes, "predictions": predictions.tolist()}) + "\n"
            )
            print(f"{len(predictions)} predictions of {world.size} ranks, accuracy {accuracy:.4f}: {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
