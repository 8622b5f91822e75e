"""One flat gradient buffer, summed in a few large collectives while the backward pass still runs.

A parameter's gradient is copied into its place in the buffer as soon as autograd has it, and `.grad` becomes a view of
that place. The buffer is cut into buckets of `sync.bucket_mb`, which the engine sends (`buckets.py`).

After P. Goyal et al., "Accurate, Large Minibatch SGD" (2017), §4.1.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.training.parallel.world import World
from lockstep.training.sync.base import Parameters, broadcast_module, trainable
from lockstep.training.sync.buckets import Bucket, Bucketed, Reducer


class Flat(Bucketed):
    capturable = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world = model, world
        broadcast_module(model)
        self._flats: list[torch.Tensor] = []
        buckets: list[Bucket] = []
        # The backward pass reaches the last layers first, so the buffer begins with them.
        trained = trainable(model)
        for params in self.groups(trained):
            flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
            self._flats.append(flat)
            buckets += cut(flat, params, self.settings.bucket_mb * 1e6, small_last=params[-1] is trained[-1])
        self.reducer = self.make_reducer(buckets)
        self.zero_grad()
        return model

    def groups(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters that share a buffer, each group of one element type."""
        return [[p for p in params if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in params)]

    def make_reducer(self, buckets: list[Bucket]) -> Reducer:
        return Reducer(self.model.named_parameters(), buckets)

    def gradients(self, of: Parameters | None = None) -> list[torch.Tensor]:
        return self._flats if of is None else super().gradients(of)


LAST_BYTES = 1e6
"""Most bytes of the last bucket, unless it is one larger parameter: no computation is left to overlap with its sum."""


def cut(flat: torch.Tensor, params: list[nn.Parameter], min_bytes: float, small_last: bool = True) -> list[Bucket]:
    """Buckets over the gradients of `params` in `flat` (1-d), each of at least `min_bytes` but the last two.

    Args:
        small_last: keep the last bucket small, because the backward pass reaches its parameters last. The bucket before it
            holds the rest.
    """
    least, last = (size / flat.element_size() for size in (min_bytes, min(LAST_BYTES, min_bytes)))
    last = max(last, params[-1].numel()) if small_last else 0
    buckets: list[Bucket] = []
    start = end = 0
    inside: list[nn.Parameter] = []
    views: list[torch.Tensor] = []
    for number, parameter in enumerate(params):
        piece = flat[end : end + parameter.numel()]
        # The strides of the parameter, so that channels_last weights get gradients of the same layout.
        views.append(piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset()))
        inside.append(parameter)
        end += parameter.numel()
        left = len(flat) - end
        begins_the_last = left <= last < left + parameter.numel()
        if end - start >= least or begins_the_last or number == len(params) - 1:
            buckets.append(Bucket(inside, flat[start:end], views))
            start, inside, views = end, [], []
    return buckets
