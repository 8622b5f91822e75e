"""The networks that the doctor trains: small, and without batch statistics, so that they are the same at every world size."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ENV_FAULT = "LOCKSTEP_DOCTOR_FAULT"
"""`RANK:PASS:SIGNAL:FILE`: that rank's process gets the signal in its PASS-th training pass, once: then FILE is there."""


class Small(nn.Module):
    """[b, 3, h, w] → [b, classes]: two convolutions, the mean over the image, a linear layer."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class Faulty(Small):
    """`Small`, in a process that dies or stands still where `LOCKSTEP_DOCTOR_FAULT` says."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__(num_classes, width)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        rank, number, name, once = [*os.environ.get(ENV_FAULT, "").split(":", 3), "", "", "", ""][:4]
        if (
            self.training
            and (rank, number) == (os.environ.get("RANK", "0"), str(self.passes))
            and not Path(once).exists()
        ):
            Path(once).touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        return super().forward(x)
