from __future__ import annotations

import math

import torch

from lockstep.training.optim.ema import Ema


def test_ema_is_the_weighted_mean_of_the_past() -> None:
    model = torch.nn.BatchNorm1d(2).double()
    ema = Ema(model, decay=0.9, every=2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    ema.update(1)
    assert all(torch.equal(ema.average.state_dict()[name], tensor) for name, tensor in start.items())
    ema.update(2)
    weight = 1 - 0.9**2
    for name, tensor in ema.average.state_dict().items():
        step = weight if tensor.is_floating_point() else 1
        torch.testing.assert_close(tensor, start[name] + step)
    assert math.isclose(ema.weight, weight)
