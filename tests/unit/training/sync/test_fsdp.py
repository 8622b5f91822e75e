from __future__ import annotations

import pytest

from lockstep.training.sync import fsdp
from tests import product
from tests.product import UserError


def test_a_torch_that_takes_the_sum_for_the_mean_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo had no mean before torch 2.9, and the gradients would be wrong by the number of ranks without a word."""
    monkeypatch.setattr(fsdp, "MEAN_ON_CPU", False)
    with pytest.raises(UserError, match=r"sync\.name=fsdp .*torch 2\.9"):
        product.strategy("fsdp").check(product.recipe(), product.world(size=2))
