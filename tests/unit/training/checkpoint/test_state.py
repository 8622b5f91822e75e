from __future__ import annotations

import random

import pytest
import torch

from lockstep.training.checkpoint.state import UserState


def test_a_generator_of_another_kind_is_named() -> None:
    """A GPU's generator has 16 bytes, and torch raises `RuntimeError` for them."""
    device = torch.device("cpu")
    for state in (torch.zeros(16, dtype=torch.uint8), random.getstate(), {"bit_generator": "PCG64"}):
        user_state = UserState()
        user_state.add({"noise": torch.Generator()})
        with pytest.raises(ValueError, match="noise is a generator of another kind"):
            user_state.restore({**user_state.capture(device), "own": {"noise": state}}, device)
