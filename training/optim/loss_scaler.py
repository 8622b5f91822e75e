"""Dynamic loss scaling: float16 gradients below 6e-8 would become zero, so the loss is multiplied before backward.

The gradients are divided by the same factor before anything reads them. All factors are powers of two, so neither changes
a bit of a float32 gradient. A step whose gradient overflows is taken again with half the factor; after `GROWTH_STEPS`
steps without that the factor is doubled. bfloat16 has float32's range and needs none of this.

P. Micikevicius et al., "Mixed Precision Training" (2018), §3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch

INITIAL, LOWEST, HIGHEST = 2.0**16, 2.0**-8, 2.0**24
GROWTH_STEPS = 2000
"""Steps in a row without an overflow before the factor is doubled."""


class LossScaler:
    """The factor of one run, the same on all ranks: whether the sum over the ranks is finite decides, and all see that.

    `factor` and `inverse` are float32 scalars on the device, where a recorded step reads them anew at every replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.empty((), dtype=torch.float32, device=device)
        self.inverse = torch.empty((), dtype=torch.float32, device=device)
        self.steps = 0
        """Since the factor last changed."""
        self._halvings = 0
        """In the step under way."""
        self.set(INITIAL)

    def set(self, value: float) -> None:
        self.value = value
        self.factor.fill_(value)
        self.inverse.fill_(1 / value)

    def grow_if_due(self) -> bool:
        """Counts a step without an overflow; whether the factor was doubled."""
        self.steps += 1
        self._halvings = 0
        if self.steps < GROWTH_STEPS or self.value >= HIGHEST:
            return False
        self.steps = 0
        self.set(2 * self.value)
        return True

    def halve(self) -> bool:
        """After an overflow; False where the factor is at its lowest."""
        if self.value <= LOWEST:
            return False
        self.steps = 0
        self._halvings += 1
        self.set(self.value / 2)
        return True

    def undo(self) -> float:
        """Takes back the halvings of the step under way, which were of no use; what the factor was multiplied with."""
        risen = 2.0**self._halvings
        self._halvings = 0
        self.set(self.value * risen)
        return risen

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set(float(state["factor"]))
        self.steps = int(state["steps"])


def is_state(value: Any) -> bool:
    """Whether `value` may be what `state_dict` gave."""
    if not isinstance(value, dict) or value.keys() != {"factor", "steps"} or type(value["factor"]) is not float:
        return False
    in_range = LOWEST <= value["factor"] <= HIGHEST and math.frexp(value["factor"])[0] == 0.5
    return in_range and type(value["steps"]) is int and 0 <= value["steps"] < GROWTH_STEPS
