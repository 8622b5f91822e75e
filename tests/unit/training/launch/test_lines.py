"""Many writers, whole lines."""

from __future__ import annotations

import contextlib
import io

import pytest

from lockstep.training.contract import say
from lockstep.training.launch.lines import LIMIT, WholeLines
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


def test_what_is_written_in_pieces_comes_out_in_whole_lines_with_one_prefix() -> None:
    """As torch's agent hands them on: every piece it finds begins with the prefix of its rank. An endless line is not kept."""
    out = io.StringIO()
    lines = WholeLines(out)
    for piece in ("[rank 0] I am", "[rank 0]  rank 0, see [rank 1]", "[rank 0] \n", "plain\n", "[rank 0] killed here"):
        lines.write(piece)
    assert out.getvalue() == "[rank 0] I am rank 0, see [rank 1]\nplain\n"
    lines.finish()
    assert out.getvalue().endswith("plain\n[rank 0] killed here\n")
    lines.write("\r50 %" * LIMIT)
    assert len(out.getvalue()) > LIMIT
