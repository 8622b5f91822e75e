"""An optimizer whose learning rates can live on the device, so that a recorded step reads them anew at every replay."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def _plain(method: Any) -> Any:
    """The method as it is written. torch hides some from its compiler, and imports all of that (a second or two of every
    start) at the first call to do so; nothing here compiles an optimizer."""
    return getattr(method, "__wrapped__", method)


class RatedOptimizer(Optimizer):
    """Base of our optimizers. `rate(i)` is the rate of group i: a float, or a scalar on the device after `use_tensor`."""

    add_param_group = _plain(Optimizer.add_param_group)
    state_dict = _plain(Optimizer.state_dict)
    load_state_dict = _plain(Optimizer.load_state_dict)

    rates: torch.Tensor | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    def use_tensor(self, device: torch.device) -> torch.Tensor:
        """From here on steps read their rates from the returned float32 tensor [groups], not from `param_groups`."""
        self.rates = torch.zeros(len(self.param_groups), dtype=torch.float32, device=device)
        return self.rates

    def rate(self, group: int) -> float | torch.Tensor:
        return self.param_groups[group]["lr"] if self.rates is None else self.rates[group]
