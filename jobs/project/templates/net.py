"""The network."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Images [b, 1, 8, 8] → logits [b, 10]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.head(hidden.flatten(1))
