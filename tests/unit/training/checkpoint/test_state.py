from __future__ import annotations

import random

import pytest
import torch

from lockstep.training.checkpoint.state import UserState


def test_a_generator_of_another_kind_is_named() -> None:
    """A GPU's generator has 16 bytes, and torch raises `RuntimeError` for them."""
    device = torch.device("cpu")
    for state in (torch.zeros(16, dtype=torch.uint8), random.getstate(), {"bit_generator": "PCG64"}):
        kept = UserState()
        kept.add({"noise": torch.Generator()})
        with pytest.raises(ValueError, match="noise is a generator of another kind"):
            kept.restore({**kept.capture(device), "own": {"noise": state}}, device)


def test_a_value_that_no_checkpoint_can_hold_is_named_at_the_save() -> None:
    kept = UserState()
    kept.values["b"] = [1, object()]
    with pytest.raises(TypeError, match=r"run\.values/b/1: a tree cannot hold a object"):
        kept.rank_state()
