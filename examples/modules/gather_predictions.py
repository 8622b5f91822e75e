"""torchrun --standalone --nproc-per-node 3 examples/modules/gather_predictions.py OUT.json

Each rank classifies its own part of scikit-learn's digits; rank 0 gathers the parts, which are of unequal length, and
writes all predictions in the order of the images.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

from lockstep.training.parallel import world


def gather_rows(mine, me):
    """The tensors of all ranks on rank 0, in their order, None elsewhere; their first dimensions may differ."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(me.size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=mine.device))
    padded = mine.new_zeros(max(map(int, lengths)), *mine.shape[1:])  # gather takes equal parts
    padded[: len(mine)] = mine
    pieces = [torch.empty_like(padded) for _ in range(me.size)] if me.rank == 0 else None
    dist.gather(padded, pieces, dst=0)
    return [piece[: int(length)] for piece, length in zip(pieces, lengths)] if me.rank == 0 else None


def main(out, me):
    digits = load_digits()
    images, labels = torch.tensor(digits.data, device=me.device), torch.tensor(digits.target, device=me.device)
    held_out = torch.arange(len(images), device=me.device) % 5 == 2
    means = torch.stack([images[(labels == digit) & ~held_out].mean(0) for digit in range(10)])
    mine = images[held_out].tensor_split(me.size)[me.rank]
    parts = gather_rows(torch.cdist(mine, means).argmin(1), me)  # the nearest mean is the prediction
    if parts is not None:
        predictions = torch.cat(parts)
        accuracy = float((predictions == labels[held_out]).double().mean())
        found = {"accuracy": accuracy, "parts": [len(part) for part in parts], "predictions": predictions.tolist()}
        out.write_text(json.dumps(found) + "\n")
        print(f"{len(predictions)} predictions of {me.size} ranks, accuracy {accuracy:.4f}: {out}")


if __name__ == "__main__":
    with world.script() as me:
        main(Path(sys.argv[1]), me)
