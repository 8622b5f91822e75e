"""Several models in one run, each with a strategy of its own: the networks of a GAN, a student and its teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lockstep.training.config import Sync
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import GradientSync

ALLOWED = ("flat", "ddp", "allreduce", "bf16_compress")
"""Strategies that keep whole replicas and nothing from step to step."""


class Several(GradientSync):
    """The strategies of several models as one: in a step those work whose models learn.

    `model` holds the models by their names.
    """

    def __init__(self, settings: Sync, world: World, parts: dict[str, GradientSync]) -> None:
        super().__init__(settings)
        self.parts = list(parts.values())
        self.model = nn.ModuleDict({name: part.model for name, part in parts.items()})
        self.learning, self.averages, self.world = self.parts, self.parts[0].averages, world

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return sum(part.bytes_sent for part in self.parts)

    @property
    def watch(self) -> Any:  # type: ignore[override]
        return self.learning[0].watch

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        raise NotImplementedError("each part wraps its own model")

    @contextlib.contextmanager
    def step_of(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> Iterator[None]:
        """Inside, the models of these optimizers learn. The others are part of the loss, but get no gradient and send none."""
        stepping = {
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        }
        self.learning = [part for part in self.parts if any(p in stepping for p in part.model.parameters())]
        resting = [part for part in self.parts if part not in self.learning]
        frozen = [p for part in resting for p in part.model.parameters() if p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            with contextlib.ExitStack() as stack:
                for part in resting:
                    stack.enter_context(part.accumulate())
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self.learning = self.parts

    def zero_grad(self) -> None:
        for part in self.learning:
            part.zero_grad()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in self.learning:
                stack.enter_context(part.accumulate())
            yield

    def synchronize(self) -> None:
        for part in self.learning:
            part.synchronize()

    def abandon(self) -> None:
        for part in self.learning:
            part.abandon()

    def gradients(self, of: Any = None) -> list[torch.Tensor]:
        return [gradient for part in self.learning for gradient in part.gradients(of)]
