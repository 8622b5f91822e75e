"""The strategies `flat` and `bf16_compress`, and their engine: buckets of gradients, summed while backward still runs.

A parameter's gradient is copied into its place in one flat buffer as soon as autograd has it, and `.grad` becomes a view of
that place. The buffer is cut into buckets of `sync.bucket_mb`.

Collectives match by their order alone, and two ranks may get their gradients in different orders, or lack some. So the
buckets start strictly in one order, the same on all ranks, each as soon as its gradients are complete. A bucket that is
complete early waits for its turn, and `synchronize` sends a missing gradient as zero.

A zero has a sign, and a sum is -0.0 only if all its terms are. So the first element of a missing gradient is sent as -0.0, and that of
every other gradient as any other number. A sum that begins with -0.0 shows that no rank has a gradient.

    autograd has a gradient  →  on_grad (base.py)  →  Reducer.on_gradient  →  Reducer.send  →  dist.all_reduce

After S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), §3.2 and §4.2.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from ..contract import UserError
from ..parallel import stores
from ..parallel.world import World
from .base import (
    GradientSync,
    Parameters,
    broadcast_module,
    in_memory,
    nbytes,
    on_grad,
    placed,
    refuse_recording,
    stands_for_none,
    trains_another,
)


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Gradients that one collective sends: those of one parameter, or of several that share a buffer.

    Args:
        buffer: 1-d, the gradients of all `params` one after another. None: the bucket has one parameter, and sends its `.grad`.
        views: views of the buffer for each parameter's gradient, of the parameter's shape; []: there is no buffer.
    """

    params: list[nn.Parameter]
    buffer: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    missing: int = 0
    """Number of parameters whose gradient is not complete yet in this step."""
    work: dist.Work | None = None
    """The collective under way; None: none is."""
    rounded: torch.Tensor | None = None
    """The payload in the type that is sent; None: the payload itself is sent."""
    lacking: dict[nn.Parameter, int] = field(default_factory=dict)
    """Parameter without a gradient on this rank in this step → its start in the payload."""
    starts: list[int] = field(init=False)
    """Start of each parameter's gradient in the payload."""
    firsts: torch.Tensor = field(init=False)
    """The first element of each gradient in the payload."""

    def __post_init__(self) -> None:
        self.starts = [0]
        if self.buffer is not None:
            self.starts = [int(view.storage_offset() - self.buffer.storage_offset()) for view in self.views]
        starts = [start for start, parameter in zip(self.starts, self.params) if parameter.numel()]
        self.firsts = torch.tensor(starts, dtype=torch.long, device=self.params[0].device)

    @property
    def payload(self) -> torch.Tensor:
        """The 1-d tensor to sum. A bucket without a buffer has it once its parameter has a gradient."""
        grad = self.params[0].grad if self.buffer is None else self.buffer
        assert grad is not None
        return grad

    @property
    def is_here(self) -> bool:
        return self.work is None or self.work.is_completed()

    def fill(self) -> None:
        """Puts zeros in the place of missing gradients."""
        for index, parameter in enumerate(self.params):
            if parameter.grad is None:
                # A view has an old gradient.
                parameter.grad = self.views[index].zero_() if self.views else torch.zeros_like(parameter)
                if parameter.numel():
                    self.lacking[parameter] = self.starts[index]


_CHANGES = itertools.count(1)
"""Numbers of the changes of trained parameters in this process."""


class SentAlready(UserError, AssertionError):
    """An error for a backward pass after the gradients were sent. (Horovod's scripts expect `AssertionError`.)"""


class Reducer:
    """The engine that sums gradients over the ranks.

    Args:
        model: a module, or names and parameters, in the same order on all ranks. A parameter takes part once it has `requires_grad`.
        cut: returns buckets of parameters, last layers first, in the order of their start; by default one per parameter.
        mean: whether the sum is divided by the number of ranks.
        passes: backward passes whose gradients are added up before a parameter is sent.
        sent_as: the element type in which gradients are sent; None: their own.
        owners: parameter → the only rank that gets its sum; the others keep a partial sum. None: all ranks get it.

    `backward` raises `SentAlready` if a parameter gets a gradient in more than `passes` passes, and `UserError` for a sparse
    gradient.
    """

    def __init__(
        self, model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        cut: Callable[[list[nn.Parameter]], list[GradientBucket]] | None = None, *,
        mean: bool = False, passes: int = 1, sent_as: torch.dtype | None = None, owners: dict[nn.Parameter, int] | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._cut = cut or (lambda params: [GradientBucket([p]) for p in params])
        self.mean, self.passes, self.sent_as, self.owners = mean, passes, sent_as, owners
        self.weight = 1.0
        """Factor of this rank's gradients before the sum."""
        self.bytes_sent = 0
        self.paused_now = False
        self.names: dict[nn.Parameter, str] = {}
        self._begun = False
        """Whether `_begin` has prepared the buckets for this step."""
        self._was_paused = False
        """Whether the step has several backward passes, between which a script may unfreeze a layer."""
        self._group()

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._model.named_parameters() if isinstance(self._model, nn.Module) else self._model

    def _group(self) -> None:
        """Puts the parameters into buckets that train now, or have trained and are still in the model."""
        before = self.names
        self.names = {p: name for name, p in self._named() if p.requires_grad or p in before}
        self._ids = set(map(id, self.names))  # a tensor's own hash is a function in Python
        self.buckets = self._cut(list(reversed(self.names)))
        self._bucket = {parameter: bucket for bucket in self.buckets for parameter in bucket.params}
        self._view = {p: view for bucket in self.buckets for p, view in zip(bucket.params, bucket.views)}
        for parameter in self.names.keys() - before.keys():
            on_grad(parameter, self.on_gradient)
        self.reset()

    def _new(self) -> tuple[str, nn.Parameter] | None:
        """Returns the first parameter that trains and is in no bucket; None: there is none."""
        if isinstance(self._model, nn.Module) and not trains_another(self._model, self._ids):
            return None
        return next(((name, p) for name, p in self._named() if p.requires_grad and id(p) not in self._ids), None)

    def _begin(self) -> None:
        """Prepares the buckets before the first gradient of a step: a script may unfreeze, replace or add layers between two steps."""
        if self._begun:
            return
        if new := self._new():
            name, parameter = new
            refuse_recording(parameter, f"{name} trains since this step only")
            self._group()
            if self.size > 1:  # another rank that does not will fail, and explain it (`describe_failed_collective`)
                _get_default_store().set(stores.trained(dist.get_rank()), f"{next(_CHANGES)} {ascii(name)[1:-1][:200]}")
        self._begun = True

    @property
    def size(self) -> int:
        """Ranks of the process group; 1 in a process that has none."""
        return dist.get_world_size() if dist.is_initialized() else 1

    def reset(self) -> None:
        """Forgets the gradients of the step. No collective may be under way."""
        self._started = self._finished = 0
        self._begun = self._was_paused = False
        self._passes_left = dict.fromkeys(self._bucket, self.passes)
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.params), None
            bucket.lacking.clear()

    @property
    def pending(self) -> bool:
        """Whether gradients have come that `synchronize` has not finished."""
        under_way = self._finished < self._started
        return under_way or any(left != self.passes for left in self._passes_left.values())

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Counts a gradient that has come, and starts the buckets that are complete, in their order."""
        self._begin()
        if parameter not in self._bucket:  # of a layer that was replaced
            return
        self._accept(parameter)
        if self.paused_now:
            self._was_paused = True
            return
        self._passes_left[parameter] -= 1
        if not self._passes_left[parameter]:
            self._bucket[parameter].missing -= 1
        while self._started < len(self.buckets) and not self.buckets[self._started].missing:
            self.buckets[self._started].work = self.send(self.buckets[self._started])
            self._started += 1
        if self.sent_as is not None:  # there is work to do for each sum, which overlaps, too
            while self._finished < self._started and self.buckets[self._finished].is_here:
                self._finish_next()

    def _accept(self, parameter: nn.Parameter) -> None:
        """Puts the gradient into its bucket. Raises if it came too often, or cannot be summed."""
        if self._passes_left[parameter] <= 0:  # the bucket is, or may be, under way
            raise SentAlready(
                f"{self.names[parameter]} got a gradient in more than {self.passes} backward passes since the last "
                "synchronize(), and has been sent: run all passes of a step but the last inside accumulate() (no_sync() of "
                "a wrapped module, backward_passes_per_step of Horovod's optimizer), and synchronize() after it. "
                "torch.utils.checkpoint needs use_reentrant=False"
            )
        self._place(parameter)

    def _place(self, parameter: nn.Parameter) -> None:
        """Puts the gradient into its bucket. Raises if it cannot be summed."""
        grad, view = parameter.grad, self._view.get(parameter)
        assert grad is not None
        if grad.is_sparse:
            raise UserError(f"{self.names[parameter]} has a sparse gradient, which cannot be summed: use sparse=False")
        if view is not None and grad is not view:  # autograd's own tensor, or one that a script put there
            view.copy_(grad)
            parameter.grad = view

    def send(self, bucket: GradientBucket) -> dist.Work | None:
        """Starts the collective of a bucket that is complete on this rank. Returns None if there is no other rank."""
        if self.weight != 1.0:
            bucket.payload.mul_(self.weight)
        if self.size == 1:
            return None
        sent = bucket.payload
        if self.sent_as is not None:
            if bucket.rounded is None:
                bucket.rounded = torch.empty_like(sent, dtype=self.sent_as)
            sent = bucket.rounded.copy_(sent)
        self.bytes_sent += nbytes(sent)
        flat = in_memory(sent)
        flat.index_add_(0, bucket.firsts, flat.new_zeros(len(bucket.firsts)))  # makes 0.0 of -0.0
        if bucket.lacking:
            parameter = next(iter(bucket.lacking))
            refuse_recording(parameter, f"{self.names[parameter]} has no gradient, and another rank may have one")
            flat[list(bucket.lacking.values())] = -0.0
        if self.owners is not None:
            return dist.reduce(sent, self.owners[bucket.params[0]], async_op=True)
        return dist.all_reduce(sent, async_op=True)

    def _finish_next(self) -> None:
        bucket = self.buckets[self._finished]
        self._finished += 1
        if bucket.work is not None:
            bucket.work.wait()
            bucket.work = None
            if bucket.rounded is not None:
                bucket.payload.copy_(bucket.rounded)
        if self.mean and self.size > 1:
            bucket.payload.mul_(1.0 / self.size)

    def synchronize(self) -> None:
        """Sends the remaining buckets, with zeros for missing gradients, and waits until all sums are complete. Collective."""
        self._begin()
        if self._was_paused and (new := self._new()):
            raise UserError(
                f"{new[0]} trains since the middle of a step, so its gradient is not summed over the ranks: unfreeze or add it between two "
                "steps"
            )
        for bucket in self.buckets[self._started :]:
            for parameter in bucket.params:
                if parameter.grad is not None:  # came before its bucket was made
                    self._place(parameter)
            bucket.fill()
            bucket.work = self.send(bucket)
            self._started += 1
        while self._finished < self._started:
            self._finish_next()
        self._leave_out()
        self.reset()

    def _leave_out(self) -> None:
        """Sets the gradient of parameters to None if no rank has one. Waits for the device if this rank lacks a gradient."""
        lacking = [parameter for bucket in self.buckets for parameter in bucket.lacking]
        if lacking and self.size > 1:
            sums = [in_memory(b.payload)[list(b.lacking.values())] for b in self.buckets if b.lacking]
            absent = torch.cat([stands_for_none(firsts) for firsts in sums]).tolist()
        else:
            absent = [True] * len(lacking)
        for parameter, is_absent in zip(lacking, absent, strict=True):
            if is_absent:
                parameter.grad = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Makes backward passes in the block add to the gradients and send nothing."""
        before, self.paused_now = self.paused_now, True  # may be nested
        try:
            yield
        finally:
            self.paused_now = before


class Bucketed(GradientSync):
    """A strategy whose gradients a `Reducer` sums. `wrap` or `make_optimizer` sets the reducer."""

    reducer: Reducer

    @property
    def bytes_sent(self) -> int:
        return self.reducer.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self.reducer.bytes_sent = count

    def zero_grad(self) -> None:
        self.reducer.reset()
        for parameter in self.reducer.names:
            parameter.grad = None

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self.reducer.paused()

    def synchronize(self) -> None:
        self.reducer.synchronize()


class Flat(Bucketed):
    """The buffer, unchanged. After P. Goyal et al., "Accurate, Large Minibatch SGD" (2017), §4.1."""

    capturable = True
    sent_as: torch.dtype | None = None
    owners: dict[nn.Parameter, int] | None = None

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model, self.world = model, world
        broadcast_module(model)
        self.reducer = Reducer(model, self._cut, sent_as=self.sent_as, owners=self.owners)
        self.zero_grad()
        return model

    def _cut(self, trained: list[nn.Parameter]) -> list[GradientBucket]:
        # The backward pass reaches the last layers first, so the buffer begins with them.
        self._flats: list[torch.Tensor] = []
        buckets: list[GradientBucket] = []
        for params in self.groups(trained):
            flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
            self._flats.append(flat)
            buckets += cut(flat, params, self.settings.bucket_mb * 1e6, small_last=params[-1] is trained[-1])
        return buckets

    def groups(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Returns the groups of parameters that share a buffer, each of one element type."""
        return [[p for p in params if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in params)]

    def gradients(self, parameters: Parameters | None = None) -> list[torch.Tensor]:
        return self._flats if parameters is None else super().gradients(parameters)


class Bf16Compress(Flat):
    """The buffer sent as bfloat16: half the bytes of float32, for slow networks. Works over gloo and NCCL alike.

    Lossy. bfloat16 has float32's range and 8 bits of precision, so nothing overflows. Each rank's part is rounded once, and
    each sum of two parts once more. With w ranks an element of the sum is off by at most w · 2⁻⁸ of the sum of the parts'
    magnitudes. torch's own `bf16_compress_hook` does the same on NCCL only.
    """

    capturable = False
    sent_as = torch.bfloat16


LAST_BYTES = 1e6
"""Most bytes of the last bucket, unless it is one larger parameter: no computation remains to overlap with its sum."""


def cut(
    flat: torch.Tensor, params: list[nn.Parameter], min_bytes: float, small_last: bool = True
) -> list[GradientBucket]:
    """Returns buckets over the gradients of `params` in `flat` (1-d), each of at least `min_bytes` except the last two.

    Args:
        small_last: whether to keep the last bucket small, because the backward pass reaches its parameters last. The bucket before it
            holds the rest.
    """
    least, last = (size / flat.element_size() for size in (min_bytes, min(LAST_BYTES, min_bytes)))
    last = max(last, params[-1].numel()) if small_last else 0
    buckets: list[GradientBucket] = []
    start = end = 0
    inside: list[nn.Parameter] = []
    views: list[torch.Tensor] = []
    for number, parameter in enumerate(params):
        piece = flat[end : end + parameter.numel()]
        views.append(placed(piece, parameter))
        inside.append(parameter)
        end += parameter.numel()
        left = len(flat) - end
        begins_the_last = left <= last < left + parameter.numel()
        if end - start >= least or begins_the_last or number == len(params) - 1:
            buckets.append(GradientBucket(inside, flat[start:end], views))
            start, inside, views = end, [], []
    return buckets
