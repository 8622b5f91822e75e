"""The network of the CIFAR-10 speedruns: 94 % in eight epochs, 1.97 M trained parameters in 14 tensors.

Architecture and constants from K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (2024) and
KellerJordan/cifar10-airbench.
It has a frozen 2×2 whitening convolution with its negation, and three groups of two convolutions. Batch norm has frozen
weights, filters begin as the identity, and logits are divided by the last width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .bag_of_tricks import whitening_filters


class _Norm(nn.BatchNorm2d):
    """Batch norm whose weight stays 1; its bias is trained."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-12, momentum=0.4)  # of a batch, in torch's sense
        self.weight.requires_grad_(False)


class Group(nn.Module):
    """3×3 convolution → 2×2 max pool → norm → GELU → 3×3 convolution → norm → GELU."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = _Norm(fan_out), _Norm(fan_out)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight[: conv.in_channels])  # the first filters hand their input through

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Speedrun(nn.Module):
    """Images [b, 3, 32, 32] → logits [b, num_classes].

    Args:
        width: factor on every number of channels.
    """

    fsdp_blocks = ("group?",)

    def __init__(self, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        if not 1 / 16 <= width <= 16:
            raise ValueError(f"width must be in [1/16, 16], got {width}")
        c1, c2, c3 = (max(int(channels * width), 1) for channels in (64, 256, 256))
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)
        nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]
        self.group1 = Group(24, c1)
        self.group2 = Group(c1, c2)
        self.group3 = Group(c2, c3)
        self.head = nn.Linear(c3, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()

    @torch.no_grad()
    def prepare(self, images: torch.Tensor) -> None:
        """Sets the whitening filters from normalised images [n, 3, h, w]; the first 5,000 are used."""
        filters = whitening_filters(images[:5000], size=2, eps=5e-4)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.whitening(x))
        x = self.group3(self.group2(self.group1(x)))
        x = F.max_pool2d(x, x.shape[-2:]).flatten(1)
        return self.head(x) / x.shape[1]
