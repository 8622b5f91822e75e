"""A multilayer perceptron: linear layers without bias, tanh between them."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class MLP(nn.Module):
    """Features [b, in_features] (or images, flattened) → logits [b, num_classes].

    Weights are drawn uniformly after K. He et al., "Delving deep into rectifiers" (2015), with torch's own gain √2.

    Args:
        in_features: features of a sample.
        hidden: widths of the layers between; three of them make four layers.
    """

    def __init__(
        self, num_classes: int = 32, in_features: int = 1024, hidden: tuple[int, ...] | list[int] = (256, 128, 64)
    ) -> None:
        super().__init__()
        widths = [in_features, *hidden, num_classes]
        if not all(isinstance(width, int) and width >= 1 for width in widths):
            raise ValueError(f"in_features and hidden must be whole numbers from 1, got {in_features} and {hidden}")
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))
        for layer in self.layers:
            nn.init.kaiming_uniform_(layer.weight)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)
