from __future__ import annotations

from lockstep.training.optim import piecewise_linear
from tests import product


def test_the_published_schedule_at_its_own_steps_and_at_any_batch_size() -> None:
    points = [(0.0, 0.0), (2.0, 1.0), (8.0, 0.1), (10.0, 0.1)]
    published = [i / 193 for i in range(194)] + [1 - 0.9 * i / 581 for i in range(582)]
    for step in range(1, 776):  # 97 steps an epoch; the published table has its points one step apart from ours
        assert abs(piecewise_linear(points, step / 97) - published[step]) < 0.006
    assert piecewise_linear(points, 9.5) == 0.1 and piecewise_linear([], 3) == 1.0


def test_a_schedule_in_steps() -> None:
    points = product.recipe("mlp").optim.schedule
    assert [round(piecewise_linear(points, step), 6) for step in (0, 500, 1000, 2000)] == [1.0, 0.65, 0.3, 0.3]
