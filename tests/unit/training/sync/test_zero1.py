from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.training.sync.zero1 import combines


class Noisy(torch.optim.SGD):
    """Draws from each generator in its step, and seeds all."""

    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        super().step(closure)
        random.random(), np.random.rand()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn(()) + random.random() + float(np.random.rand()))


def test_the_probe_of_an_optimizer_leaves_no_trace_in_the_generators() -> None:
    """And what a step draws is no sign that it combines parameters."""
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert not combines(Noisy([torch.nn.Parameter(torch.ones(3))], lr=0.1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(np.random.get_state()))
