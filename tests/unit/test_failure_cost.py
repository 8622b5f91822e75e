"""The parts of a failure's cost, from the marks that a training prints (benchmarks/failure.py)."""

from __future__ import annotations

import pytest

from benchmarks.failure import Mark, main, marks, parts
from benchmarks.interval import costs, expected
from lockstep.training.contract import UserError

KILLED = Mark("killed", 1, 11, 100.0, 31)
START = [
    Mark(name, rank, 20 + rank, at + rank, 20)
    for name, at in (("begun", 101.0), ("imported", 104.0), ("joined", 105.0), ("restored", 106.5))
    for rank in (0, 1)
]
STEPS = [Mark("step", 0, 20, 107.6 + 0.5 * number, 21 + number) for number in range(15)]


def test_a_failures_parts_add_up_to_the_step_where_it_struck() -> None:
    before = [Mark("step", 0, 10, 99.9, 31), Mark("begun", 0, 10, 50.0, 0)]
    found = parts(KILLED, {*before, *START, *STEPS})
    assert found is not None
    assert {name: round(value, 3) for name, value in found.items()} == {
        "noticed": 2.0, "imports": 3.0, "ranks meet": 1.0, "restored": 1.5, "first step": 0.1, "replayed": 5.0, "steps lost": 11,
    }  # fmt: skip


def test_the_last_of_several_starts_counts() -> None:
    """Where the ranks had to start twice: nothing was trained in between."""
    in_vain = [Mark("begun", rank, 30 + rank, 100.5, 20) for rank in (0, 1)]
    assert parts(KILLED, {*in_vain, *START, *STEPS}) == parts(KILLED, {*START, *STEPS})


def test_without_the_step_of_the_failure_there_is_no_cost_yet() -> None:
    assert parts(KILLED, {*START, *STEPS[:9]}) is None
    late = [Mark("step", 0, 10, 100.2, 32)]  # an old process' step that ended after the kill
    assert parts(KILLED, {*START, *late}) is None


def test_marks_stand_in_lines_of_any_rank_and_may_be_cut_off() -> None:
    lines = ['[rank 1] MARK ["killed", 1, 11, 100.0, 31]', '[rank 0] MARK ["step", 0, 1', "[rank 0] something else"]
    assert marks(lines) == {KILLED}


def test_what_was_lost_is_restart_replay_and_saving() -> None:
    """The failure is told by both ranks of every later start, and counts once."""
    begin = Mark("step", 0, 10, 90.0, 1)
    seen = {begin, KILLED, KILLED._replace(rank=0, pid=20), *START, *STEPS}
    found = costs(seen, 10.0, 1)
    assert {name: round(value, 3) for name, value in found.items()} == {
        "lost": 14.6, "restart": 7.6, "replayed": 5.0, "saving": 2.0,
    }  # fmt: skip
    with pytest.raises(UserError, match="1 failures were seen, 2 were asked for"):
        costs(seen, 10.0, 2)


def test_the_formula_has_its_least_where_young_puts_it() -> None:
    best = (2 * 0.1 * 500) ** 0.5
    lost = {every: expected(0.1, 5.0, every, 500.0) for every in (best / 2, best, 2 * best)}
    assert min(lost, key=lambda every: lost[every]) == best == 10 and lost[best] == 5 + 5 + 5


@pytest.mark.parametrize("words", [["--on", "compose", "--kind", "launcher"], ["--kind", "node"]])
def test_what_no_kill_reaches_is_refused_before_a_job_is_submitted(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["failure.py", *words])
    with pytest.raises(UserError, match="take --kind node|needs --node-down"):
        main()
