"""The moments at which autograd has gradients: hooks that call a strategy, and what they say of the phases of a step."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ..parallel.world import World

Mark: TypeAlias = "float | torch.cuda.Event"
"""A point in time: seconds of the host, or an event in the GPU's stream."""


def mark(device: torch.device) -> Mark:
    """This point of the rank's work, to be handed to a `StepClock` later."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def on_grad(parameter: torch.Tensor, method: Callable[[Any], None]) -> None:
    """Calls `method(parameter)` as soon as autograd has the parameter's gradient, while the method's object lives.

    Python's garbage collector does not see a tensor's hooks. Held through them, a strategy and its model would keep each
    other for ever, and with them a process group that was destroyed.
    """
    weak = weakref.WeakMethod(method)

    def hook(ready: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(ready)

    parameter.register_post_accumulate_grad_hook(hook)


def hooks_of(model: nn.Module) -> Iterator[tuple[int, str, bool, Any]]:
    """Yields each hook on a parameter: its number, the parameter's name, whether it is for an accumulated gradient, and the function.
    No other hook of the process gets the number."""
    for name, parameter in model.named_parameters():
        for after, hooks in enumerate((parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
            for number, hook in (hooks or {}).items():
                yield number, name, bool(after), hook


def hooks_of_script(model: nn.Module, of_strategy: Container[int] = ()) -> Iterator[tuple[str, bool]]:
    """The parameters with a hook that neither torch nor we nor the strategy have registered, and whether it is one for an accumulated
    gradient."""
    for number, name, after, hook in hooks_of(model):
        if number not in of_strategy and not is_ours(hook):
            yield name, after


def is_ours(hook: Any) -> bool:
    """Whether torch or we have written the function."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(("torch.", "lockstep."))


def is_nested_backward() -> bool:
    """Whether a backward pass that a layer runs inside of another one has called this hook."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
    return False


class GradientWatch:
    """When all of this rank's own gradients had come, and where it waited for other ranks before that.

    For strategies that wait for the other ranks inside the forward or the backward pass.
    With any other strategy the own gradients are complete when `synchronize` is called.

    Args:
        unused: some gradients may not come at all. Then the own part ends with the backward pass.
    """

    def __init__(self, world: World, unused: bool = False) -> None:
        self._world, self._unused = world, unused
        self._hooked: set[torch.Tensor] = set()
        self._queued = False
        self.missing: set[torch.Tensor] = set()
        """Parameters whose gradient has not come yet in this pass."""
        self.announced: set[torch.Tensor] | None = None
        """Parameters whose next gradient a forward pass has announced to what sums it; None: nothing is to be announced now."""
        self.past: list[torch.Tensor] = []
        """Of each backward pass that nothing had announced, the parameter whose gradient came first."""
        self._is_past = False
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted of this step."""
        self.complete: Mark | None = None
        """When the last own gradient came."""
        self.waits: list[tuple[Mark, Mark]] = []
        """Waits for other ranks, from … to …, before that."""
        self._waits_since: list[tuple[Mark, Mark]] = []
        """Those since then: of no interest, unless a further pass follows."""

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """A pass begins that gives each of these a gradient."""
        self.missing = set(parameters)
        for parameter in self.missing - self._hooked:
            on_grad(parameter, self._on_grad)
        self._hooked |= self.missing
        self._queued = False

    def _on_grad(self, parameter: torch.Tensor) -> None:
        self.missing.discard(parameter)
        if self.announced is not None:
            if parameter in self.announced:
                self.announced.discard(parameter)
            elif not self._is_past:
                self._is_past = True
                self.past.append(parameter)
                torch.autograd.Variable._execution_engine.queue_callback(self._past_ends)
        if not self._unused:
            if not self.missing:
                self._completed()
        elif not self._queued:  # at the first gradient, so that it is called before a callback of DDP, which waits
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self._queued = False
        self._completed()
        if self.announced:
            self.announced.clear()  # the others are not used, and count as here

    def _completed(self) -> None:
        self.complete = mark(self._world.device)
        self.waits += self._waits_since
        self._waits_since.clear()

    def _past_ends(self) -> None:
        self._is_past = False

    def now(self) -> Mark:
        return mark(self._world.device)

    def waited(self, since: Mark) -> None:
        """The rank has waited for other ranks since then. It counts where own gradients come after it."""
        self._waits_since.append((since, mark(self._world.device)))
