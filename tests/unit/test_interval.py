"""`checkpoint.every_seconds: auto`: the interval from made-up costs and failures, and when the saver asks for a save."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.training import config as configuration
from lockstep.training.checkpoint.interval import LEAST_SECONDS, MOST_SECONDS, PRIOR_SECONDS, Interval
from lockstep.training.contract import UserError
from lockstep.training.run.saver import Saver
from tests.events import events
from tests.ranks import training


def _measured(cost: float, write: float = 0.5, failures: int = 0) -> Interval:
    found = Interval(failures)
    found.stalled(cost)
    found.written(write)
    return found


def test_young_and_dalys_formula_with_the_prior_and_what_was_seen() -> None:
    assert _measured(2.0).seconds(0.0) == pytest.approx(math.sqrt(2 * 2.0 * PRIOR_SECONDS))
    # Three failures in two days of training, and the prior's one in a day: 18 hours.
    seen = _measured(2.0, failures=3)
    assert seen.mtbf(2 * 86_400) == pytest.approx(3 * 86_400 / 4)
    assert seen.seconds(2 * 86_400) == pytest.approx(math.sqrt(2 * 2.0 * 3 * 86_400 / 4))


def test_the_interval_is_bounded() -> None:
    assert Interval(0).seconds(0.0) == LEAST_SECONDS  # until a save has been measured
    assert _measured(1e-6).seconds(0.0) == LEAST_SECONDS
    assert _measured(600.0).seconds(1e9) == MOST_SECONDS
    assert _measured(0.001, write=100.0).seconds(0.0) == 200.0  # the disk must have done with one before the next
    assert Interval(-3).failures == 0  # a run directory may have been copied, or its history be another's


def test_the_median_counts_and_one_slow_save_does_not() -> None:
    found = _measured(0.1)
    for cost in (0.1, 0.1, 50.0, 0.1):
        found.stalled(cost)
    assert found.cost == 0.1


class _Context(SimpleNamespace):
    told: list[tuple[str, dict[str, Any]]]

    def event(self, kind: str, **values: Any) -> None:
        self.told.append((kind, values))


def _context(every: str, leader: bool = True, attempt: int = 1) -> Any:
    config = configuration.load("smoke", [f"every_seconds={every}"])
    state = SimpleNamespace(history={"preemptions": 1}, clock=SimpleNamespace(trained=0.0))
    lines: list[str] = []
    return _Context(
        config=config, run=None, steps_done=0, attempt=attempt, state=state, world=SimpleNamespace(leader=leader), told=[],
        console=SimpleNamespace(line=lines.append), lines=lines,
    )  # fmt: skip


def test_only_the_leader_asks_and_at_the_interval() -> None:
    clock = [100.0]
    saver = Saver(_context("auto"), now=lambda: clock[0])
    other = Saver(_context("auto", leader=False), now=lambda: clock[0])
    clock[0] = 100.0 + LEAST_SECONDS - 0.1
    assert not saver.due_by_time()
    clock[0] += 0.2
    assert saver.due_by_time() and not other.due_by_time()  # the ranks agree on the leader's wish
    saver.interval.stalled(1.0)
    saver.interval.written(0.5)
    best = math.sqrt(2 * PRIOR_SECONDS)
    assert not saver.due_by_time()
    clock[0] = 100.0 + best + 0.1
    assert saver.due_by_time()


def test_starts_that_followed_neither_an_end_nor_a_save_are_failures() -> None:
    assert Saver(_context("auto", attempt=1)).interval.failures == 0
    assert Saver(_context("auto", attempt=5)).interval.failures == 3  # one of the four starts before was preempted


def test_a_number_stays_one_and_what_is_neither_is_refused() -> None:
    clock = [0.0]
    saver = Saver(_context("5"), now=lambda: clock[0])
    clock[0] = 5.0
    assert saver.due_by_time() and not Saver(_context("0"), now=lambda: clock[0]).due_by_time()
    with pytest.raises(UserError, match="must be a number or auto, got 'often'"):
        configuration.load("smoke", ["every_seconds=often"])


def test_it_is_told_once_in_the_log(tmp_path: Path, tiny: list[str]) -> None:
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "every_seconds=auto", "every_steps=2"]
    done = training(*words)
    assert done.code == 0, done.output
    assert done.output.count("(every_seconds: auto)") == 1, done.output
    (event,) = events(tmp_path / "run", "checkpoint_interval")
    assert event["seconds"] >= LEAST_SECONDS and event["failures"] == 0 and event["mtbf_seconds"] >= PRIOR_SECONDS
