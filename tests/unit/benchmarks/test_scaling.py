"""`python -m benchmarks.scaling`: what it prints adds up. No test here looks at a speed."""

from __future__ import annotations

import re

import pytest

from benchmarks.scaling import Row, why
from tests import product
from tests.warm.gang import python


def test_the_sentence_is_arithmetic_on_what_was_measured() -> None:
    """Of the median step: one of each was slow."""
    first = Row("", 1, 8, 1, steps=[[0.1, 0.0, 0.09, 0.0], [0.1, 0.0, 0.09, 0.0], [9.0, 9.0, 9.0, 9.0]])
    last = Row("", 2, 8, 1, steps=[[0.08, 0.0, 0.05, 0.02], [0.08, 0.0, 0.05, 0.02], [9.0, 9.0, 9.0, 9.0]])
    assert last.phases == pytest.approx([0.0, 0.05, 0.02, 0.01])
    sentence = why([first, last])
    assert "Why is it not 2×?" in sentence and "takes 80.0 ms where 1/2 of the step on 1 would be 50.0 ms" in sentence
    assert "The difference: waiting +20.0 ms, compute +5.0 ms, rest +5.0 ms, data +0.0 ms." in sentence
    assert "give --ranks at least two" in why([first])


ROW = r"^(\w+(?: \w+)?) +(\d) +(\d+) +([\d.]+) +[\d.]+× +([\d.]+) \|((?: +[\d.]+){4}) \| +[\d.]+ +[\d.]+$"


def test_it_prints_a_row_for_each_way_to_train_also_where_one_fails(tiny: list[str]) -> None:
    words = [
        "--ranks",
        "2",
        "--steps",
        "2",
        "--rounds",
        "1",
        "--batch",
        "12",
        "--strategies",
        f"{product.DATA_PARALLEL},{product.ALLREDUCE}",
    ]
    settings = [word for word in tiny if not word.startswith(("data.", "model="))]
    done = python("-m", "benchmarks.scaling", *words, "--set", *settings, "model=tests.nets:Sociable", timeout=400)
    assert done.code == 0 and re.search(r"^DataParallel .*nobody is here", done.output, re.M), done.output
    rows = re.findall(ROW, done.output, re.M)
    assert [values[:3] for values in rows] == [("batch fixed", "2", "12"), ("AllReduce", "2", "12")], done.output
    for _, _, batch, rate, step, phases in rows:
        assert float(rate) == pytest.approx(1000 * int(batch) / float(step), rel=0.05)
        assert sum(map(float, phases.split())) == pytest.approx(float(step), abs=0.3)
