"""The base of the optimizers here, and the plain ones: torch's own SGD and Adam, without its compiler, and Nesterov's.

torch hides some of their methods from the compiler. For that it imports all of it at the first call: one or two CPU seconds
of every start. Nothing here compiles an optimizer, so these classes call the hidden methods.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch.optim import Optimizer


class PlainOptimizer(Optimizer):
    """Base of every optimizer here."""

    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    zero_grad = unwrap(Optimizer.zero_grad)


class SGD(PlainOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class Adam(PlainOptimizer, torch.optim.Adam):
    """`torch.optim.Adam`."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class RatedOptimizer(PlainOptimizer):
    """Base of our own optimizers: the learning rates can live on the device, so that a recorded step reads them anew at every
    replay."""

    rates: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            rate = group["lr"] if self.rates is None else self.rates[number]
            self.update([p for p in group["params"] if p.grad is not None], group, rate)
        return loss

    def update(self, params: list[torch.Tensor], group: dict[str, Any], rate: float | torch.Tensor) -> None:
        """Updates the parameters of a group that have a gradient.

        Args:
            rate: the group's learning rate: a number, or a float32 scalar on the device.
        """
        raise NotImplementedError

    def velocities(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """The momentum buffers, zeros at first; with the layout of their parameters."""
        for p in params:
            if not self.state[p]:
                self.state[p]["velocity"] = torch.zeros_like(p)
        return [self.state[p]["velocity"] for p in params]

    def use_tensor(self, device: torch.device) -> None:
        """From here on steps read their rates from `rates`, a float32 tensor [groups], not from `param_groups`."""
        self.rates = torch.zeros(len(self.param_groups), dtype=torch.float32, device=device)

    def publish_rates(self) -> None:
        """Copies the groups' rates to where steps read them, after `use_tensor`."""
        if self.rates is not None:
            if len(self.rates) != len(self.param_groups):  # a script has added a group
                self.use_tensor(self.rates.device)
            self.rates.copy_(torch.tensor([group["lr"] for group in self.param_groups]), non_blocking=True)


class Nesterov(RatedOptimizer):
    """Nesterov's momentum as the bag of tricks has it, with the learning rate inside the velocity.

        g ← −lr (g + wd·w);   v ← m·v + g;   w ← w + g + m·v.

    torch.optim.SGD keeps the rate outside, so a change of rate rescales the velocity there and does not here.
    Source: 99991/cifar10-fast-simple, `update_nesterov`.
    """

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
