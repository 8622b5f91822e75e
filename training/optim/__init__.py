"""The optimizer of a run and its learning rates, from its config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..config import Config, Optim, settings
from ..contract import UserError
from .base import SGD, Adam, Nesterov
from .muon import Muon


def build(
    parameters: Iterable[torch.nn.Parameter], config: Config, global_batch: int, model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Two groups: weights, and one-dimensional parameters (biases, norms) with their own rate and decay.

    Each name in `optim.groups` moves the parameters that have it in their dotted name in `model` from these two into a
    separate group. With a summed loss the weight decay that was tuned at `reference_batch_size` grows with the batch,
    as the gradient does.

    Raises:
        UserError: a name of `optim.groups` leaves its group without a parameter.
    """
    optim = config.optim
    growth = global_batch / optim.reference_batch_size if optim.reference_batch_size else 1.0
    decay, factor = optim.weight_decay * growth, optim.bias_lr_factor
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    named = {parameter: name.split(".") for name, parameter in model.named_parameters()} if model is not None else {}
    groups: list[dict[str, Any]] = []
    for part, group_settings in optim.groups.items():
        members = [p for p in trained if part in named.get(p, ())]
        if not members:  # its settings would have no effect, without a message
            near = settings.nearest(part, {name for parameter in trained for name in named.get(parameter, ())})
            raise UserError(
                f"optim.groups.{part}: no parameter that is trained, and that no earlier group has, has {part!r} in its dotted name{near}"
            )
        trained = [p for p in trained if part not in named.get(p, ())]
        groups.append({
            "params": members, "part": part, "momentum": group_settings.get("momentum", optim.momentum),
            "weight_decay": group_settings.get("weight_decay", optim.weight_decay) * growth,
        })  # fmt: skip
    # Decay acts at rate × weight_decay: a group with `factor` times the rate keeps the same with a `factor`-th of the decay.
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "lr_factor": 1.0, "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "lr_factor": factor, "weight_decay": decay / factor},
        *groups,
    ]
    groups = [group for group in groups if group["params"]]
    if optim.name == "nesterov":
        return Nesterov(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "muon":
        return Muon(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "adam":
        for group in groups:  # what the others call momentum is Adam's first beta
            group["betas"] = (group.pop("momentum", optim.momentum), 0.999)
        return Adam(groups, lr=optim.lr, fused=True)
    # Fused, it goes through the memory once instead of four times. torch has no such kernel for sharded parameters
    # (DTensor, whose import would be half a second of every start).
    sharded = any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"])
    sgd = SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=not sharded, foreach=sharded)
    if not sharded:
        sgd.register_step_pre_hook(_start_momentum)
    return sgd


def _start_momentum(sgd: torch.optim.Optimizer, *_: object) -> None:
    """The fused kernel fails where one parameter has momentum and another, whose first gradient this is, has none. From
    zeros the first step gives the same momentum, the gradient."""
    for group in sgd.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and sgd.state[parameter].get("momentum_buffer") is None:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def piecewise_linear(points: Sequence[tuple[float, float]], when: float) -> float:
    """The factor at `when` (fractions of an epoch count): linear between points, flat outside, 1 without points."""
    if not points:
        return 1.0
    if when <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):  # noqa: RUF007 - a pair of points reads better so
        if when <= x1:
            return y0 + (y1 - y0) * (when - x0) / (x1 - x0)
    return points[-1][1]


def set_rates(optimizer: torch.optim.Optimizer, optim: Optim, when: float) -> None:
    """Sets each group's rate for the step after which the schedule is at `when`, in its unit; a part of an epoch counts."""
    for group in optimizer.param_groups:
        own = optim.groups.get(group.get("part", ""), {})
        rate = own.get("lr", optim.lr) * piecewise_linear(own.get("schedule", optim.schedule), when)
        group["lr"] = rate * group.get("lr_factor", 1.0)
