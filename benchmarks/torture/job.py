"""What the scripts train: a small network on random data, six epochs of ten steps on two ranks, 20 ms a step."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS, STEPS, BATCH = 6, 10, 8
"""Epochs, steps of one, samples of a rank in a step."""
torch.set_num_threads(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    samples = 2 * STEPS * BATCH
    return TensorDataset(
        torch.randn(samples, 32, generator=generator), torch.randint(4, (samples,), generator=generator)
    )


def tell(step: int, loss: torch.Tensor, rank: int | None = None) -> None:
    time.sleep(0.02)
    if (int(os.environ.get("RANK", "0")) if rank is None else rank) == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)


def finish(model: nn.Module, run: Path, rank: int | None = None) -> None:
    """The weights that are compared; each start that trains to the end writes them."""
    if (int(os.environ.get("RANK", "0")) if rank is None else rank) == 0:
        torch.save(model.state_dict(), run / "final.pt")
