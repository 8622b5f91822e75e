from __future__ import annotations

import pytest
import torch

from lockstep.training.models.speedrun import Speedrun


def test_the_first_filters_hand_their_input_through_and_the_head_has_unit_spread() -> None:
    model = Speedrun(width=0.25)
    x = torch.randn(2, 24, 8, 8)
    torch.testing.assert_close(model.group1.conv1(x)[:, :16], x[:, :16])
    assert float(model.head.weight.detach().std()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="activation"):
        Speedrun(activation="tanh")  # type: ignore[arg-type]
