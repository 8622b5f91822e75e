"""The network: `model: net:Net` in recipe.yaml."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Images [b, 3, h, w] → logits [b, num_classes]. Lockstep gives the number of classes of the data."""

    def __init__(self, num_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.head(F.adaptive_max_pool2d(hidden, 1).flatten(1))
