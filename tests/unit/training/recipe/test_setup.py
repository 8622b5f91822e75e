from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from lockstep.training.recipe import setup


def test_a_layer_that_a_network_keeps_in_evaluation_mode_stays_there() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), nn.Linear(4, 3))
    manifest: Any = SimpleNamespace(shape=[4], classes=["a", "b", "c"])
    setup._check_outputs(net, "own", manifest)
    assert [module.training for module in net] == [True, False, True] and net.training
