from __future__ import annotations

import json
import random

import pytest
import torch

from lockstep.training.checkpoint.user_state import UserState, Values


def test_a_generator_of_another_kind_is_named() -> None:
    """A GPU's generator has 16 bytes, and torch raises `RuntimeError` for them."""
    device = torch.device("cpu")
    for state in (torch.zeros(16, dtype=torch.uint8), random.getstate(), {"bit_generator": "PCG64"}):
        kept = UserState()
        kept.add({"noise": torch.Generator()})
        with pytest.raises(ValueError, match="noise is a generator of another kind"):
            kept.restore({**kept.capture(device), "own": {"noise": state}}, device)


def test_values_are_joined_like_mappings_and_looked_at() -> None:
    values = Values("run.values")
    values.update(a=1)
    assert values | {"b": 2} == {"a": 1, "b": 2} == {"b": 2} | values and json.loads(json.dumps(values)) == {"a": 1}
    with pytest.raises(TypeError, match=r"run\.values\['b'\]"):
        values |= {"b": object()}
    for setting in (values.update, lambda value: values.setdefault("b", value["b"])):
        with pytest.raises(TypeError, match=r"run\.values\['b'\]"):
            setting({"b": object()})
    assert values == {"a": 1} and values.setdefault("a", 2) == 1
