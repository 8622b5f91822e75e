"""Who diverged? Names the rank and the parameter behind a gradient that is not finite.

The check itself costs no collective (see `Step`), but it sees the sum, not its author. A step is a pure function of the
weights and the cursor, so every rank takes its backward pass once more without sending, and looks at its own gradients.
"""

from __future__ import annotations

import torch

from training.data.augment import draw_keys
from training.data.loader import Batch
from training.exchange import all_gather_trees
from training.step import Step


def diagnose(step: Step, batch: Batch, epoch: int) -> str:
    """One sentence that names every rank whose own loss or gradient is not finite. Collective; clears the gradients."""
    state = step.state
    kept = [tensor.clone() for tensor in step.statistics()]
    network, step.network = step.network, state.model
    state.sync.zero_grad()
    try:
        with state.sync.accumulate():
            step.backward(batch, draw_keys(step.config.seed, epoch))
        own = _first_bad(step)
    finally:
        step.network = network
        step.restore(kept)
        state.sync.zero_grad()
    found = [f"rank {rank}: {what}" for rank, what in enumerate(all_gather_trees(own, state.world)) if what]
    return "; ".join(found) or "every rank's own gradient is finite, but their sum overflows"


def _first_bad(step: Step) -> str | None:
    for name, parameter in step.state.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"parameter {name} is not finite"
    if not bool(torch.isfinite(step.state.losses).all()):
        return f"loss is not finite{_first_gradient(step)}"
    return _first_gradient(step).removeprefix(", ") or None


def _first_gradient(step: Step) -> str:
    for name, parameter in step.state.model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f", gradient of {name} is not finite"
    return ""
