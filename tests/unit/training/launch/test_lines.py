"""Many writers, whole lines."""

from __future__ import annotations

import contextlib

import pytest

from lockstep.training.contract import say
from lockstep.training.launch.lines import WholeLines
from tests.ranks import training

pytestmark = pytest.mark.promise("restarts")


def test_a_full_disk_costs_a_line_and_not_the_next_ones() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    try:
        lines = WholeLines(full)
        assert lines.write("[rank 0] lost\n") == 14
        assert lines.write("[rank 0] lost, too\n") == 19
    finally:
        with contextlib.suppress(OSError):
            full.close()


def test_a_name_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    say("loss of \x1b[2J is not finite")
    told = capsys.readouterr().out + training("evaluate", "none\x1b[2J").output
    assert "\x1b" not in told and told.count("\\x1b[2J") == 2
