from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.training.models.arithmetic import arithmetic_of
from lockstep.training.recipe import loop


def test_a_layer_that_a_network_keeps_in_evaluation_mode_stays_there() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3))
    manifest: Any = SimpleNamespace(shape=[4], classes=["a", "b", "c"])
    loop._check_outputs(net, "own", manifest)
    assert [module.training for module in net] == [True, False, True] and net.training


def test_a_network_that_cannot_be_counted_is_left_in_its_modes() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    with pytest.raises(RuntimeError):
        arithmetic_of(net, torch.ones(2, 3))
    assert [module.training for module in net] == [True, False] and net.training
