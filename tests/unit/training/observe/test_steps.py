"""Which rank is slow, in which phase, at what cost: from made-up times, so that the right answer is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.training.observe import steps
from lockstep.training.observe.steps import History, costs, over_the_others

pytestmark = pytest.mark.promise("alerts")
Floats = npt.NDArray[np.float64]
seconds = st.floats(0, 10, width=32)
times = st.tuples(st.integers(1, 6), st.integers(2, 5)).flatmap(
    lambda shape: arrays(np.float64, (*shape, 3), elements=seconds)
)
STEPS, BASE = 20, 0.05
"""In a block; seconds of an undisturbed step."""


@given(times)
def test_what_a_rank_costs_is_what_the_steps_would_gain(own: Floats) -> None:
    cost, total = costs(own), own.sum(axis=2)
    quicker = total.copy()
    for row in quicker:
        row[row.argmax()] = sorted(row)[-2]
    assert cost.sum() == pytest.approx((total.max(axis=1) - quicker.max(axis=1)).sum(), abs=1e-5)
    assert (cost.sum(axis=1) >= -1e-6).all()
    swapped = costs(own[:, ::-1])[::-1]
    if len({*total.ravel()}) == total.size:  # of equal ones the first is taken
        assert np.allclose(swapped, cost)


@given(times)
def test_above_the_others_adds_up_to_nothing(own: Floats) -> None:
    assert over_the_others(own.sum(axis=2)).sum(axis=1) == pytest.approx(np.zeros(len(own)), abs=1e-4)


class Machine:
    """Ranks whose steps have lognormal noise, in which one of them may be slow."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.ranks = ranks
        self.history = History([10 * rank for rank in range(ranks)])

    def go(self, blocks: int, rank: int = 0, phase: int = 0, more: float = 0.0) -> float:
        """One block a second. Returns the share of the steps that would be gained without `more` seconds of this rank."""
        gained = spent = 0.0
        for _ in range(blocks):
            own = BASE / 3 * self.random.lognormal(sigma=0.15, size=(STEPS, self.ranks, 3))
            without = own.sum(axis=2).max(axis=1).sum()
            own[:, rank, phase] += more
            with_it = own.sum(axis=2).max(axis=1).sum()
            gained, spent = gained + with_it - without, spent + with_it
            self.history.add(own, with_it)
        return gained / spent


@pytest.mark.parametrize(
    ("ranks", "share"), [(2, 0.1), (2, 0.2), (2, 0.5), (4, 0.1), (4, 0.2), (4, 0.5), (16, 0.3), (16, 0.5)]
)
def test_a_rank_is_named_with_the_phase_and_what_would_be_gained(ranks: int, share: float) -> None:
    machine = Machine(ranks, seed=ranks)
    machine.go(40)
    assert machine.history.verdict is None
    gained = machine.go(steps.BLOCKS, rank=1, phase=2, more=share * BASE)
    verdict = machine.history.verdict
    assert verdict is not None and (verdict.rank, verdict.phase) == (10, "update")
    assert gained - 0.015 < verdict.share < gained + 0.04, "chance makes the others slowest, too, but not as often"
    machine.go(steps.BLOCKS)
    assert machine.history.verdict is None


def test_of_ranks_that_are_alike_none_is_named() -> None:
    verdicts = 0
    for seed in range(200):
        machine = Machine(2 + seed % 7, seed)
        machine.go(30)
        verdicts += machine.history.verdict is not None
    assert verdicts <= 1
