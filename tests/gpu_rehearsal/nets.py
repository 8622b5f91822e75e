"""Small networks for the rehearsal, in addition to those of tests/nets.py."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn

from tests import product
from tests.nets import DyingPlain, SmallConv


class Normed(SmallConv):
    """With ordinary batch norm, and without dropout."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.norm = nn.BatchNorm2d(2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.conv2(F.relu(self.conv1(x))))).mean((2, 3)))


class Peeking(SmallConv):
    """Rank 1 looks at its activations, as no recorded step can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == "1" and float(x.abs().max()) > 1e9:
            x = x * 0
        return super().forward(x)


def _fail(_: torch.Tensor) -> None:
    raise ArithmeticError("this rank was told to fail")


class Unfinished(DyingPlain):
    """Rank 1 fails late in its fifth backward pass, when gradients of other layers are being summed already."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        if self.training and self.passes == 5 and os.environ.get("RANK") == "1":
            self.conv1.weight.register_hook(_fail)
        return logits


class Tardy(SmallConv):
    """Rank 1 comes late to each recorded step, as one whose data is late."""

    def __init__(self, num_classes: int = 10, width: int = 8) -> None:
        super().__init__(num_classes, width)
        if os.environ.get("RANK") == "1":
            product.late_inputs(0.4)
