from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.training.models.arithmetic import arithmetic_of


def test_a_network_that_cannot_be_counted_is_left_in_its_modes() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    with pytest.raises(RuntimeError):
        arithmetic_of(net, torch.ones(2, 3))
    assert [module.training for module in net] == [True, False] and net.training
