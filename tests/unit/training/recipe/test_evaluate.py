from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lockstep.training.recipe.evaluate import augmented


@pytest.mark.promise("published-methods")
def test_views_and_weights_at_test_time() -> None:
    torch.manual_seed(3)
    x = torch.randn(8, 3, 6, 6)
    weight = torch.randn(3 * 6 * 6, 5)

    def logits(view: torch.Tensor) -> torch.Tensor:
        return view.flatten(1) @ weight

    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    views = [(x, 1 / 2), (padded[..., 0:6, 0:6], 1 / 4), (padded[..., 2:8, 2:8], 1 / 4)]
    expected = sum(share * (logits(view) + logits(view.flip(-1))) / 2 for view, share in views)
    torch.testing.assert_close(augmented(logits, x, "flip_shift"), expected)
