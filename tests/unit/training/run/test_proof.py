"""When a function proves itself, and what of a network is looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.training.run.proof import EVERY, attributes, due


def test_proofs_are_drawn_by_seed_and_step_alone_and_are_rare() -> None:
    steps = [step for step in range(20_000) if due(3, step)]
    assert steps[:3] == [0, 1, 2] and steps == [step for step in range(20_000) if due(3, step)]
    assert steps != [step for step in range(20_000) if due(4, step)]
    assert 0.6 < len(steps) * EVERY / 20_000 < 1.4


def _roll(net: Any) -> None:
    net.value = [torch.tensor([1.0]), {"a": torch.tensor([3.0])}]


CHANGES: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "number": (1, lambda net: setattr(net, "value", 2)),
    "tensor": (torch.zeros(2), lambda net: net.value.data.add_(1)),
    "array": (np.zeros(2), lambda net: net.value.__iadd__(1)),
    "list": ([torch.tensor([1.0]), {"a": torch.tensor([2.0])}], _roll),
    "dictionary": ({}, lambda net: net.value.update(a=1)),
    "set": (set(), lambda net: net.value.add(1)),
    "generator": (torch.Generator(), lambda net: torch.rand(1, generator=net.value)),
    "numpy's old generator": (np.random.RandomState(1), lambda net: net.value.rand()),
    "numpy's generator": (np.random.default_rng(0), lambda net: net.value.random()),
    "Python's generator": (random.Random(0), lambda net: net.value.random()),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_an_attribute_of_a_module_holds_is_seen(kind: str) -> None:
    value, change = CHANGES[kind]
    net: Any = nn.Sequential(nn.BatchNorm1d(2), nn.LSTM(2, 2))
    net[1].value = value
    before = attributes(net)
    assert attributes(net) == before and "1.value" in before
    assert not {"0.weight", "0.running_mean", "1.training", "1._flat_weights", "1._parameters"} & {*before}
    change(net[1])
    assert {name for name, text in attributes(net).items() if before[name] != text} == {"1.value"}
