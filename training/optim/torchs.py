"""torch's own SGD and Adam without its compiler, whose import would be one or two CPU seconds of every start.

torch hides some of their methods from the compiler, and imports all of it at the first call to do so. Nothing here
compiles an optimizer, so these classes call what is hidden.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def _plain(method: Any) -> Any:
    """The method as it is written."""
    return inspect.unwrap(method)


class PlainOptimizer(Optimizer):
    """Base of every optimizer here."""

    add_param_group = _plain(Optimizer.add_param_group)
    state_dict = _plain(Optimizer.state_dict)
    load_state_dict = _plain(Optimizer.load_state_dict)
    zero_grad = _plain(Optimizer.zero_grad)


class SGD(PlainOptimizer, torch.optim.SGD):
    """`torch.optim.SGD`."""

    _step = staticmethod(_plain(torch.optim.SGD.step))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._step(self, closure)


class Adam(PlainOptimizer, torch.optim.Adam):
    """`torch.optim.Adam`."""

    _step = staticmethod(_plain(torch.optim.Adam.step))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._step(self, closure)
