"""Nesterov's momentum as the bag of tricks has it, with the learning rate inside the velocity.

    g ← −lr (g + wd·w);   v ← m·v + g;   w ← w + g + m·v

torch.optim.SGD keeps the rate outside, so a change of rate rescales the velocity there and does not here.
Source: 99991/cifar10-fast-simple, `update_nesterov`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from training.optim.rates import RatedOptimizer


class Nesterov(RatedOptimizer):
    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            params: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["velocity"] = torch.zeros_like(p)
            velocities = [self.state[p]["velocity"] for p in params]
            grads: Any = [p.grad for p in params]
            if group["weight_decay"]:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            grads = torch._foreach_mul(grads, -self.rate(number))
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, grads)
            torch._foreach_add_(params, grads)
            torch._foreach_add_(params, velocities, alpha=group["momentum"])
        return loss
