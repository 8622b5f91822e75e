"""What every gradient-sync strategy does. The loop knows nothing else of them.

The loop backpropagates `local_sum * loss_scale / divisor`: the sum of the losses of the rank's own samples, divided by
the size of the *global* batch (1 for a summed loss). Summed over the ranks that is the gradient of the whole batch,
however unequal the parts are. A strategy that averages sets `loss_scale` to the world size.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.clock import StepClock
from training.config import Sync
from training.world import World

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class GradientSync(ABC):
    loss_scale: float = 1.0
    bytes_sent: int = 0
    """Bytes of gradient this rank has handed to collectives so far."""
    capturable: bool = False
    """Whether a step with this strategy can be recorded in a CUDA graph."""

    def __init__(self, settings: Sync) -> None:
        self.settings = settings

    @abstractmethod
    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:
        """The network to call. The replicas have rank 0's parameters and buffers from here on.

        `example` is a batch that the network accepts; a strategy may run it, and leaves no trace of it.
        """

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters; strategies that shard it wrap it."""
        return build(self.model.parameters())

    @abstractmethod
    def zero_grad(self) -> None:
        """Forgets all gradients."""

    @abstractmethod
    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Backward passes inside add to the gradients and send nothing; the next one outside sends the sum."""

    @abstractmethod
    def finish(self, clock: StepClock) -> None:
        """Returns when every `.grad` is the gradient of the global batch; marks `grad_ready` and `synced`."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to at most `max_norm` (L2, over all parameters). Returns the norm before."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, foreach=True)

    def grad_norm(self) -> torch.Tensor:
        """The L2 norm of all gradients, the same on every rank; not finite if any rank's gradient is not."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return nn.utils.get_total_norm(grads, foreach=True)

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, part of the checkpoint. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most strategies have none
        """Collective."""

    model: nn.Module
    """The module as the user wrote it; set by `wrap`."""


@torch.no_grad()
def broadcast_module(model: nn.Module) -> None:
    """Sends rank 0's parameters and buffers to all ranks, one collective an element type."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for tensors in groups.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.broadcast(flat, 0)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(piece.view(tensor.shape))
