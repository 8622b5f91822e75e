"""One flat gradient buffer, summed in a few large collectives while the backward pass still runs.

A parameter's gradient is copied into its place in the buffer as soon as autograd has it, and `.grad` becomes a view of
that place. A bucket whose last gradient has arrived is summed at once. Buckets start strictly in their order, so every
rank issues the same collectives even where some ranks lack a gradient: the missing one counts as zero.

After J. Goyal et al., "Accurate, Large Minibatch SGD" (2017), §4.1, and S. Li et al., "PyTorch Distributed" (2020), §4.2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from training.clock import StepClock
from training.sync.base import GradientSync, broadcast_module, nbytes, on_grad, trained
from training.world import World


@dataclass(slots=True)
class Bucket:
    buffer: torch.Tensor
    params: list[nn.Parameter]
    missing: set[int] = field(default_factory=set)
    """Indices into `params` whose gradient has not come yet in this step."""
    work: dist.Work | None = None


class Flat(GradientSync):
    capturable = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self._world, self._silent = model, world, False
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        broadcast_module(model)
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._flats: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        # Backward reaches the last layers first, so the buffer begins with them.
        for params in self._groups(trained(model)):
            self._lay_out(params)
        for number, bucket in enumerate(self._buckets):
            for index, parameter in enumerate(bucket.params):
                on_grad(parameter, self._on_grad, number, index)
        self.zero_grad()
        return model

    def _groups(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """The parameters that share a buffer, each group of one element type."""
        return [[p for p in params if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in params)]

    def _lay_out(self, params: list[nn.Parameter]) -> None:
        flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
        self._flats.append(flat)
        limit = self.settings.bucket_mb * 1e6 / flat.element_size()
        start = at = 0
        inside: list[nn.Parameter] = []
        for number, parameter in enumerate(params):
            piece = flat[at : at + parameter.numel()]
            # The strides of the parameter, so that channels_last weights get gradients of the same layout.
            self._views[parameter] = piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
            at += parameter.numel()
            inside.append(parameter)
            if at - start >= limit or number == len(params) - 1:
                self._buckets.append(Bucket(flat[start:at], inside))
                start, inside = at, []

    def _on_grad(self, number: int, index: int, parameter: nn.Parameter) -> None:
        bucket = self._buckets[number]
        if index not in bucket.missing:  # its bucket is, or may be, on its way
            raise self.refuse(
                f"sends each gradient once a step, and {self._names[parameter]} got another after that",
                "run every backward pass of a step but the last inside accumulate(), and synchronize() after it",
            )
        view = self._views[parameter]
        if parameter.grad is not view:  # autograd's own tensor, or one that somebody put there
            view.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        if not self._silent:
            bucket.missing.discard(index)
            self._start_ready()

    def _start_ready(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        if self._world.size > 1:
            bucket.work = self._send(bucket)

    def _send(self, bucket: Bucket) -> dist.Work | None:
        """Starts the collective of a bucket that is complete on this rank."""
        self.bytes_sent += nbytes(bucket.buffer)
        return dist.all_reduce(bucket.buffer, async_op=True)

    def _receive(self, bucket: Bucket) -> None:
        """The collective of the bucket is done."""

    def zero_grad(self) -> None:
        self._expect_all()
        super().zero_grad()

    def _expect_all(self) -> None:
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.params)))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        before, self._silent = self._silent, True  # may be nested
        try:
            yield
        finally:
            self._silent = before

    def finish(self, clock: StepClock) -> None:
        clock.grad_ready()
        for bucket in self._buckets[self._next :]:
            for index in bucket.missing:
                parameter = bucket.params[index]
                if parameter.grad is None:
                    self._views[parameter].zero_()
                    parameter.grad = self._views[parameter]
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
                self._receive(bucket)
        self._expect_all()  # the loop may forget the gradients through its optimizer instead of through this strategy
        clock.synced()

    def grad_norm(self) -> torch.Tensor:
        return nn.utils.get_total_norm(self._flats)

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = self.grad_norm()
        torch._foreach_mul_(self._flats, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
