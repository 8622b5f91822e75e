"""A wrapper of our own that says what DDP does: one asynchronous all-reduce a parameter, started from inside backward.

    network = HookedDataParallel(model)         # every rank has rank 0's weights from here on
    F.cross_entropy(network(x), y).backward()   # each gradient is on its way as soon as autograd has it
    network.synchronize()                       # and is the mean over the ranks from here on: to clip it, say
    optimizer.step()                            # synchronises by itself where that has not been done

Collectives match by their order alone, and two ranks may get their gradients in different orders, or lack some. So the
all-reduces start strictly in one order, the same on all ranks: a gradient that comes early waits for its turn, and one
that does not come is sent as zero by `synchronize`.

After S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020), §3.2.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from training.clock import StepClock
from training.config import Config
from training.contract import UserError
from training.sync.base import BuildOptimizer, GradientSync, broadcast_module, nbytes, on_grad
from training.world import World


class Reducer:
    """The engine: sums gradients over the ranks, and scales them.

    Args:
        named: names and parameters, in the same order on all ranks. Those without `requires_grad` are left alone.
        scale: what the sum is multiplied with; 1/world size for the mean.
        passes: backward passes whose gradients are added up before a parameter is sent.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], scale: float = 1.0, passes: int = 1) -> None:
        self.scale, self.passes = scale, passes
        self.weight = 1.0
        """What this rank's gradients are multiplied with before they are summed."""
        self.bytes_sent = 0
        self.silent = False
        self.on_done: Callable[[nn.Parameter], None] | None = None
        """Called with each parameter as soon as its gradient is there, in order."""
        self.names = {parameter: name for name, parameter in named if parameter.requires_grad}
        self.order = list(reversed(self.names))  # backward reaches the last layers first
        self.size = dist.get_world_size()
        self._handles = [on_grad(parameter, self._on_grad) for parameter in self.order]
        self.reset()

    def reset(self) -> None:
        """Forgets what has come. Nothing may be under way."""
        self.works: dict[nn.Parameter, dist.Work | None] = {}
        """Started, not waited for yet, in order."""
        self.started = 0
        self._missing = dict.fromkeys(self.order, self.passes)

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    @property
    def pending(self) -> bool:
        """Whether gradients have come that `synchronize` has not dealt with."""
        return bool(self.works) or any(missing != self.passes for missing in self._missing.values())

    def _on_grad(self, parameter: nn.Parameter) -> None:
        if self.silent:
            return
        if self._missing[parameter] <= 0:
            raise AssertionError(
                f"{self.names[parameter]} got a gradient in more than {self.passes} backward passes (backward_passes_per_step) "
                "since the last step: add up gradients where nothing is sent, or raise the number of passes"
            )
        self._missing[parameter] -= 1
        while self.started < len(self.order) and self._missing[self.order[self.started]] <= 0:
            self._start(self.order[self.started])
        if self.on_done is not None:
            while self.works and self._is_completed(next(iter(self.works.values()))):
                self._finish_first()

    def _start(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            grad = parameter.grad = torch.zeros_like(parameter)
        if grad.is_sparse:
            raise UserError(
                f"{self.names[parameter]} has a sparse gradient, which is not summed here: use sparse=False"
            )
        if self.weight != 1.0:
            grad.mul_(self.weight)
        self.started += 1
        self.works[parameter] = None
        if self.size > 1:
            self.works[parameter] = dist.all_reduce(grad, async_op=True)
            self.bytes_sent += nbytes(grad)

    @staticmethod
    def _is_completed(work: dist.Work | None) -> bool:
        return work is None or work.is_completed()

    def _finish_first(self) -> None:
        parameter, work = next(iter(self.works.items()))
        if work is not None:
            work.wait()
        del self.works[parameter]
        if self.scale != 1.0:
            parameter.grad.mul_(self.scale)  # type: ignore[union-attr]
        if self.on_done is not None:
            self.on_done(parameter)

    def synchronize(self) -> None:
        """Sends what has not been sent, as zero where there is none, and returns when all gradients are there."""
        for parameter in self.order[self.started :]:
            self._start(parameter)
        while self.works:
            self._finish_first()
        self.reset()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        before, self.silent = self.silent, True  # may be nested
        try:
            yield
        finally:
            self.silent = before


def _has_one_of(optimizer: torch.optim.Optimizer, parameters: dict[nn.Parameter, str]) -> bool:
    return any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])


_wrapped: list[weakref.ref[Reducer]] = []
"""In the order in which they were made, which is the same on all ranks."""


def _synchronize_first(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before each step of any optimizer: no rank may step with the gradient of its own part alone.

    As under DDP, every rank runs a backward pass through each wrapped module before the step; where one may not, every
    rank calls `synchronize`.
    """
    alive = {reference: found for reference in _wrapped if (found := reference()) is not None}
    _wrapped[:] = alive
    for reducer in alive.values():
        if reducer.pending and reducer.on_done is None and _has_one_of(optimizer, reducer.names):
            reducer.synchronize()


register_optimizer_step_pre_hook(_synchronize_first)


class HookedDataParallel(nn.Module):
    """Data parallelism around any module, for scripts of one's own. Needs a process group; every rank constructs it.

    Gradients are averaged over the ranks, as by torch's DDP: exact for mean losses over parts of equal size.
    """

    def __init__(self, module: nn.Module, scale: float | None = None) -> None:
        """`scale` is what the sums of the gradients are multiplied with; by default 1/world size."""
        super().__init__()
        self.module = module
        broadcast_module(module)
        self.reducer = Reducer(module.named_parameters(), 1 / dist.get_world_size() if scale is None else scale)
        _wrapped.append(weakref.ref(self.reducer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Returns when the gradients are the mean over the ranks.

        An optimizer that has one of the parameters calls it before its step. Call it to clip or read gradients before that.
        """
        self.reducer.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside add to the gradients and send nothing; the next one outside sends the sum."""
        return self.reducer.quiet()

    def step_when_ready(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on `optimizer` updates each parameter as soon as its gradient is there, and frees the gradient.

        Its own `step` then finds nothing to do. Set the learning rate before `backward`.
        """
        self.reducer.on_done = lambda parameter: step_one(optimizer, parameter)


@torch.no_grad()
def step_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    """Updates one parameter, and forgets its gradient. Right for optimizers that treat each parameter by itself."""
    groups = [group["params"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is parameter]
        optimizer.step()
    finally:
        for group, params in zip(optimizer.param_groups, groups):
            group["params"] = params
    parameter.grad = None


@dataclass(kw_only=True, slots=True)
class HookOptions:
    step: Literal["after", "overlapped"] = "after"
    """When the optimizer updates a parameter: after the backward pass, or as soon as its gradient is there."""


class Hooks(GradientSync):
    Options = HookOptions

    def check(self, config: Config, world: World) -> None:  # noqa: ARG002
        if config.optim.clip or config.nonfinite != "ignore":
            self._need_all_gradients()
        if config.optim.name == "muon":
            self._refuse_normalise_every(config.optim.normalise_every)

    def _need_all_gradients(self) -> None:
        if self.options.step == "overlapped":
            raise self.refuse(
                "with sync.options.step=overlapped has changed weights before all gradients are known",
                "set nonfinite=ignore and optim.clip=0, or sync.options.step=after",
            )

    def _refuse_normalise_every(self, every: int) -> None:
        if self.options.step == "overlapped" and every > 1:
            raise self.refuse(
                f"with sync.options.step=overlapped takes a step a parameter, which Muon's normalise_every={every} would count",
                "set optim.normalise_every=1, or sync.options.step=after",
            )

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self.model = model
        self.network = HookedDataParallel(model, scale=1.0)  # the loop's losses make the sum the gradient
        return self.network

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        if self.options.step == "overlapped":
            self._refuse_mixing(optimizer)
            self._refuse_normalise_every(getattr(optimizer, "normalise_every", 1))
            self.network.step_when_ready(optimizer)
        return optimizer

    def grad_norm(self) -> torch.Tensor:
        self._need_all_gradients()
        return super().grad_norm()

    def clip(self, max_norm: float) -> torch.Tensor:
        self._need_all_gradients()
        return super().clip(max_norm)

    def zero_grad(self) -> None:
        self.network.reducer.reset()
        super().zero_grad()

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return self.network.no_sync()

    def finish(self, clock: StepClock) -> None:
        clock.grad_ready()
        self.network.synchronize()
        self.bytes_sent = self.network.reducer.bytes_sent
        clock.synced()
