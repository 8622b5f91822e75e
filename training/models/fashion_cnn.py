"""FashionCNN: two convolution blocks and three linear layers, 1.48 M parameters, as Fashion-MNIST tutorials have it."""

from __future__ import annotations

import torch
from torch import nn


class FashionCNN(nn.Module):
    """Images [b, in_channels, size, size] → logits [b, num_classes].

    Args:
        in_channels: 1 for grey images. size: their height and width in pixels, at least 8.
        dropout: share of the first linear layer's outputs that training leaves out.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, size: int = 28, dropout: float = 0.25) -> None:
        super().__init__()
        if size < 8 or in_channels < 1 or not 0 <= dropout < 1:
            raise ValueError(
                f"size must be at least 8, in_channels at least 1 and dropout in [0, 1), got {size}, {in_channels}, {dropout}"
            )
        left = (size // 2 - 2) // 2  # pooled, a row lost at each edge, pooled
        self.block1 = nn.Sequential(
            nn.Conv2d(in_channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.block2 = nn.Sequential(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Sequential(
            nn.Linear(64 * left**2, 600), nn.Dropout(dropout), nn.Linear(600, 120), nn.Linear(120, num_classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block2(self.block1(x)).flatten(1))
