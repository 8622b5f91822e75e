from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.training.optim.torchs import SGD, Adam


@pytest.mark.parametrize(
    ("ours", "torchs", "options"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (Adam, torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.99), "fused": True}),
    ],
)
def test_without_the_compiler_torchs_optimizers_compute_the_same(
    ours: Any, torchs: Any, options: dict[str, Any]
) -> None:
    """Bit for bit, in weights and in state, also after a round trip of the state."""
    results = []
    for kind in (ours, torchs):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        optimizer = kind([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}], **options)
        for number in range(6):
            if number == 3:
                state = optimizer.state_dict()
                optimizer = kind([{"params": net[0].parameters()}, {"params": net[2].parameters()}], **options)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            net(torch.randn(4, 7)).square().mean().backward()
            optimizer.step()
        results.append((list(net.state_dict().values()), optimizer.state_dict()))
    (mine, my_state), (theirs, their_state) = results
    assert all(map(torch.equal, mine, theirs)) and my_state["param_groups"] == their_state["param_groups"]
    for number, entries in their_state["state"].items():
        assert entries.keys() == my_state["state"][number].keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(my_state["state"][number][name]))
            for name, value in entries.items()
        )
