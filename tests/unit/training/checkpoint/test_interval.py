"""`checkpoint.every_seconds: auto`: the interval from made-up costs and failures."""

from __future__ import annotations

import math

import pytest

from lockstep.training.limits import MAX_INTERVAL_SECONDS, MIN_INTERVAL_SECONDS, PRIOR_SECONDS
from lockstep.training.run.saver import Interval

pytestmark = pytest.mark.promise("save-interval")


def _measured(cost: float, write: float = 0.5, failures: int = 0) -> Interval:
    interval = Interval(failures)
    interval.stalled(cost)
    interval.written(write)
    return interval


def test_young_and_dalys_formula_with_the_prior_and_what_was_seen() -> None:
    assert _measured(2.0).seconds(0.0) == pytest.approx(math.sqrt(2 * 2.0 * PRIOR_SECONDS))
    # Three failures in two days of training, and the prior's one in a day: 18 hours.
    assert _measured(2.0, failures=3).seconds(2 * 86_400) == pytest.approx(math.sqrt(2 * 2.0 * 3 * 86_400 / 4))


def test_the_interval_is_bounded() -> None:
    assert Interval(0).seconds(0.0) == MIN_INTERVAL_SECONDS  # until a save has been measured
    assert _measured(1e-6).seconds(0.0) == MIN_INTERVAL_SECONDS
    assert _measured(600.0).seconds(1e9) == MAX_INTERVAL_SECONDS
    assert _measured(0.001, write=100.0).seconds(0.0) == 200.0  # the disk must have done with one before the next
