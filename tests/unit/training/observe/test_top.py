"""The live table of `lockstep top`: it fits the terminal, moves no cursor, and shows who is slow."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.training.observe import top
from lockstep.training.observe.ranks import Rank, Reader, judge
from tests.jobs.test_jobs_top import SLOW, run_of


def shown(run: Path, ranks: list[Rank], width: int, height: int) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=width, height=height, force_terminal=False).print(top.picture(run, ranks, width, height))
    return output.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [80, 140])
def test_it_fits_and_moves_no_cursor(tmp_path: Path, width: int) -> None:
    ranks = judge({}, Reader(run_of(tmp_path, *SLOW)).read())
    lines = shown(Path("runs/\x1b[2J[/x]"), ranks, width, 24)
    text = "\n".join(lines)
    assert "\x1b" not in text and max(map(len, lines)) <= width
    assert "[/x]: step 40" in text and "STRAGGLER (compute)" in text and "40 of 100" in text and "…" not in text
    assert ("COMPUTE" in text) == (width == 140)


def test_of_many_ranks_as_many_as_fit_and_the_straggler(tmp_path: Path) -> None:
    ranks = judge({}, Reader(run_of(tmp_path, *[SLOW[0]] * 90, SLOW[1], SLOW[0])).read())
    for height in (24, 50):
        lines = shown(tmp_path, ranks, 130, height)
        (slow,) = [line for line in lines if "STRAGGLER" in line]
        assert len(lines) <= height and slow.split()[0] == "90"
        assert f"{92 - (height - top.AROUND)} more ranks" in "\n".join(lines)
    assert top.fitting(ranks[:10], 10) == ranks[:10]
