"""The optimizer of a run, from its config."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from training.config import Config
from training.optim.nesterov import Nesterov


def build(parameters: Iterable[torch.nn.Parameter], config: Config, global_batch: int) -> torch.optim.Optimizer:
    """Two groups: weights, and one-dimensional parameters (biases, norms) with their own rate and decay.

    With a summed loss the weight decay that was tuned at `reference_batch_size` grows with the batch, as the gradient does.
    """
    optim = config.optim
    decay = optim.weight_decay
    if optim.reference_batch_size:
        decay *= global_batch / optim.reference_batch_size
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    factor = optim.bias_lr_factor
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr_factor": 1.0, "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "lr_factor": factor, "weight_decay": decay / factor},
    ]
    groups = [group for group in groups if group["params"]]
    if optim.name == "nesterov":
        return Nesterov(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "adam":
        return torch.optim.Adam(groups, lr=optim.lr, betas=(optim.momentum, 0.999), fused=True)
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets each group's rate to `lr` times its `lr_factor`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
