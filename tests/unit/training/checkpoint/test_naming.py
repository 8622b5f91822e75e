from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.training.checkpoint import naming
from tests.unit.trees import same


def _optimizer() -> dict[str, Any]:
    """As torch has it, with an entry of the optimizer's own and a parameter that has got no gradient yet."""
    return {
        "state": {0: {"exp_avg": torch.ones(2)}, 2: {"exp_avg": torch.zeros(1)}, "count": 7},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }


def test_an_optimizers_state_goes_by_name_and_back() -> None:
    named = naming.by_name(_optimizer(), [["a", "b"], ["c"]])
    assert list(named["state"]) == ["a", "c"] and named["own"] == {"count": 7}
    assert named["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]
    assert same(naming.by_number(named, [["a", "b"], ["c"]]), _optimizer())
    other_order = naming.by_number(named, [["b", "a"], ["c"]])
    assert list(other_order["state"]) == [1, 2, "count"] and other_order["param_groups"][0]["params"] == [0, 1]


@pytest.mark.parametrize(
    ("names", "named"), [([["a", "b", "c"]], "1 groups"), ([["a", "renamed"], ["c"]], "b"), ([["a"], ["b", "c"]], "b")]
)
def test_another_optimizers_state_is_refused(names: list[list[str]], named: str) -> None:
    state = naming.by_name(_optimizer(), [["a", "b"], ["c"]])
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        naming.by_number(state, names)
    state["state"]["unknown"] = {}
    with pytest.raises(ValueError, match="unknown"):
        naming.by_number(state, [["a", "b"], ["c"]])
