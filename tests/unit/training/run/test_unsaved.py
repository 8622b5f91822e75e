from __future__ import annotations

from lockstep.training.run.unsaved import unequal


def test_what_a_rank_lacks_is_not_compared() -> None:
    """Rank 0 alone may log a number; a number that it lacks is written nowhere."""
    ranks = [
        {"run.log(a=…)": "1", "run.log(b=…)": "1"},
        {"run.log(b=…)": "1", "run.log(c=…)": "2"},
        {"run.log(c=…)": "3"},
    ]
    assert unequal(ranks) == {}
    ranks[2]["run.log(b=…)"] = "2"
    assert list(unequal(ranks)) == ["run.log(b=…)"] and "1 on rank 0 and 2 on rank 2" in unequal(ranks)["run.log(b=…)"]
