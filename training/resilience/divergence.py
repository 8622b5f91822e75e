"""Names the rank and the parameter that caused a gradient that is not finite.

The check itself costs no collective (see `step.py`), but it sees the sum, not its author. A step is a function of the weights
and the batch, so every rank takes its backward pass once more without sending, and looks at its own gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from ..parallel.exchange import all_gather_trees, any_rank
from ..parallel.world import World
from ..sync.base import GradientSync


def finite_everywhere(model: nn.Module, world: World) -> bool:
    """Whether every parameter is finite, on every rank: a strategy may have given each its own part. Collective."""
    values = [p.to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    finite = bool(torch.stack([torch.isfinite(value).all() for value in values]).all()) if values else True
    return not any_rank(not finite, world)


def diagnose(sync: GradientSync, compute: Callable[[], list[torch.Tensor]]) -> str:
    """One sentence that names every rank whose own loss or gradient is not finite. Collective; clears the gradients.

    Args:
        compute: computes the gradients of the step, and gives its losses.
    """
    sync.zero_grad()
    try:
        with sync.accumulate():
            losses = compute()
        problem = _first_bad(sync.model, losses)
    finally:
        sync.zero_grad()
    sentences = [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_trees(problem, sync.world)) if text]
    return "; ".join(sentences) or "every rank's own gradient is finite, but their sum overflows"


def _first_bad(model: nn.Module, losses: list[torch.Tensor]) -> str | None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"parameter {name} is not finite"
    problems = [] if all(bool(torch.isfinite(loss).all()) for loss in losses) else ["loss is not finite"]
    grads = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    bad = (f"gradient of {name} is not finite" for name, grad in grads if not bool(torch.isfinite(grad).all()))
    return ", ".join([*problems, *itertools.islice(bad, 1)]) or None
