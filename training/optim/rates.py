"""An optimizer whose learning rates can live on the device, so that a recorded step reads them anew at every replay."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class RatedOptimizer(Optimizer):
    """Base of our optimizers. `rate(i)` is the rate of group i: a float, or a scalar on the device after `use_tensor`."""

    rates: torch.Tensor | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    def use_tensor(self, device: torch.device) -> torch.Tensor:
        """From here on steps read their rates from the returned float32 tensor [groups], not from `param_groups`."""
        self.rates = torch.zeros(len(self.param_groups), dtype=torch.float32, device=device)
        return self.rates

    def rate(self, group: int) -> float | torch.Tensor:
        return self.param_groups[group]["lr"] if self.rates is None else self.rates[group]
