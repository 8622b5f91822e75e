"""Small networks for tests, given to the package as a user would: `--set model=tests.nets:SmallConv`."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn


class SmallConv(nn.Module):
    """Two convolutions and no batch statistics: the same function of a sample at every world size."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class NormedConv(SmallConv):
    """With ordinary batch norm and dropout: batch statistics and generators differ by rank."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.norm = nn.BatchNorm2d(2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.norm(self.conv2(F.relu(self.conv1(x)))), 0.2, self.training)
        return self.head(F.relu(x).mean((2, 3)))


class Dying(NormedConv):
    """Runs into what `LOCKSTEP_TEST_FATE` says at the n-th training forward pass: `rank:n:what`, e.g. `1:7:KILL`."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            meet_fate(self.passes, self)
        return super().forward(x)


def meet_fate(passes: int, model: nn.Module | None = None) -> None:
    fate = os.environ.get("LOCKSTEP_TEST_FATE", "")
    if not fate:
        return
    rank, number, what = fate.split(":")
    if os.environ.get("RANK", "0") != rank or passes != int(number):
        return
    once = os.environ.get("LOCKSTEP_TEST_ONCE")
    if once:  # only in the first of several starts
        if os.path.exists(once):
            return
        with open(once, "w"):
            pass
    if what == "RAISE":
        raise ArithmeticError("this rank was told to fail")
    if what == "EXIT2":
        sys.exit(2)
    if what == "NAN":
        assert model is not None
        with torch.no_grad():  # poisons this rank's gradient of one parameter only
            model.head.bias.register_hook(lambda grad: grad * float("nan"))
        return
    os.kill(os.getpid(), getattr(signal, f"SIG{what}"))
