"""Model parallel with data parallel: every form equals one process, or the command fails."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT
from tests.warm.gang import running

pytestmark = pytest.mark.promise("modules")

TOY = str(ROOT / "examples/modules/toy.py")


def test_the_toy_prints_the_modules_lines_and_equals_one_process() -> None:
    with running([[TOY]] * 4) as started:
        done = started.wait(120)
    assert done.code == 0, done.output
    for rank in range(4):
        assert done.output.count(f"Running basic DDP example on rank {rank}.") == 1
        assert done.output.count(f"Running DDP with model parallel example on rank {rank}.") == 1
    assert "both halves on one cpu device" in done.output
    off = re.search(r"mesh of 2 \(data\) × 2 \(tensor\): differs from one process by at most (\S+)", done.output)
    assert off is not None and float(off[1].rstrip(".,")) < 1e-9, done.output
    with running([[TOY, "--tensor", "2"]]) as started:
        done = started.wait(60)
    assert done.code == 2 and "must divide 1 ranks" in done.output, done.output
