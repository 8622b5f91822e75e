"""ResNet-9: eight convolutions and a linear layer, 6.58 M parameters.

After D. Page, "How to train your ResNet" (2018), in the plain form of tutorials. It has ordinary batch norm, ReLU,
convolutions with a bias, and none of the bag's tricks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def _block(fan_in: int, fan_out: int, pool: bool = False) -> nn.Sequential:
    """3×3 convolution → batch norm → ReLU (→ 2×2 max pool)."""
    layers: list[nn.Module] = [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class ResNet9(nn.Module):
    """Images [b, in_channels, h, w] → logits [b, num_classes]; h and w at least 8, 32 as published.

    Args:
        width: channels of the first convolution; the others have 2, 4 and 8 times as many.
        device, dtype: where a script of one's own wants it, e.g. `device="cuda", dtype="float32"`.
    """

    fsdp_blocks = ("stem", "stage?", "residual?.?")

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, width: int = 64, *, device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if not 1 <= width <= 1024 or in_channels < 1:
            raise ValueError(f"width must be in [1, 1024] and in_channels at least 1, got {width} and {in_channels}")
        self.stem = _block(in_channels, width)
        self.stage1 = _block(width, 2 * width, pool=True)
        self.residual1 = nn.Sequential(_block(2 * width, 2 * width), _block(2 * width, 2 * width))
        self.stage2 = _block(2 * width, 4 * width, pool=True)
        self.stage3 = _block(4 * width, 8 * width, pool=True)
        self.residual3 = nn.Sequential(_block(8 * width, 8 * width), _block(8 * width, 8 * width))
        self.head = nn.Linear(8 * width, num_classes)
        self.to(device=device, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage1(self.stem(x))
        x = x + self.residual1(x)
        x = self.stage3(self.stage2(x))
        x = x + self.residual3(x)
        return self.head(F.max_pool2d(x, x.shape[-2:]).flatten(1))
