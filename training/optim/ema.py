"""An exponential moving average of the weights and batch statistics, which evaluation uses."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """`average` ← d·average + (1 − d)·model, with d = decay ** every, every `every` steps."""

    def __init__(self, model: nn.Module, decay: float, every: int, duplicate: nn.Module | None = None) -> None:
        """`duplicate` is a copy of a sharded model, sharded in the same way; it becomes the average."""
        self.average = (copy.deepcopy(model) if duplicate is None else duplicate).requires_grad_(False).eval()
        self.every, self.weight = every, 1 - decay**every
        self._model = model

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call after optimizer step `step` (counted from 1)."""
        if step % self.every:
            return
        targets, sources = [], []
        pairs = zip(
            [*self.average.parameters(), *self.average.buffers()], [*self._model.parameters(), *self._model.buffers()]
        )
        for target, source in pairs:
            if target.is_floating_point():
                targets.append(_local(target))
                sources.append(_local(source))
            else:
                target.copy_(source)
        torch._foreach_lerp_(targets, sources, self.weight)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor (a DTensor); any other tensor unchanged."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()
