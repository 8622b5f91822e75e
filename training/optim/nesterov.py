"""Nesterov's momentum as the bag of tricks has it, with the learning rate inside the velocity.

    g ← −lr (g + wd·w);   v ← m·v + g;   w ← w + g + m·v

torch.optim.SGD keeps the rate outside, so a change of rate rescales the velocity there and does not here.
Source: 99991/cifar10-fast-simple, `update_nesterov`.
"""

from __future__ import annotations

from typing import Any

import torch

from lockstep.training.optim.base import RatedOptimizer


class Nesterov(RatedOptimizer):
    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def update(self, params: list[torch.Tensor], group: dict[str, Any], rate: float | torch.Tensor) -> None:
        if not params:
            return
        velocities = self.velocities(params)
        grads: Any = [p.grad for p in params]
        if group["weight_decay"]:
            grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
        grads = torch._foreach_mul(grads, -rate)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, grads)
        torch._foreach_add_(params, grads)
        torch._foreach_add_(params, velocities, alpha=group["momentum"])
