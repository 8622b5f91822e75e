"""A network of one's own, for `model=tiny:Tiny`."""

import torch
from torch import nn


class Tiny(nn.Sequential):
    """Images [b, 3, h, w] → logits [b, num_classes]. Lockstep gives the number of classes of the data."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, num_classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)
