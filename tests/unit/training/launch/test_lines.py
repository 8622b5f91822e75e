"""Many writers, whole lines."""

from __future__ import annotations

import contextlib
import io
import threading

import pytest

from lockstep.training.launch.lines import LIMIT, WholeLines, say
from tests.ranks import training

pytestmark = pytest.mark.promise("restarts")


class Recorder(io.StringIO):
    """Keeps every write apart, and knows what was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.flushed = 0

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)

    def flush(self) -> None:
        self.flushed = len(self.writes)


def _by_turns(lines: WholeLines, pieces: dict[str, list[str]]) -> None:
    """Each writer is a thread; they write one piece each in turn."""
    turn = threading.Barrier(len(pieces))

    def work(number: int, mine: list[str]) -> None:
        for piece in mine:
            for place in range(len(pieces)):
                turn.wait(10)
                if place == number:
                    lines.write(piece)

    threads = [threading.Thread(target=work, args=(n, mine)) for n, mine in enumerate(pieces.values())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def test_lines_written_in_pieces_come_out_whole_with_one_prefix() -> None:
    """As torch's agent hands them on: every piece it finds begins with the prefix of its rank."""
    out = Recorder()
    pieces = {f"[rank {n}] ": [f"[rank {n}] I am", f"[rank {n}]  rank {n}", f"[rank {n}] \n"] for n in range(3)}
    _by_turns(WholeLines(out), pieces)
    assert sorted(out.writes) == [f"[rank {n}] I am rank {n}\n" for n in range(3)]
    assert out.flushed == 3, "nothing waits in a buffer"


def test_what_a_rank_says_of_ranks_is_left_alone() -> None:
    out = Recorder()
    lines = WholeLines(out)
    for piece in ("[rank 0] see [rank 0] ", "[rank 0] [rank 1] and on\n", "[rank 0] [rank 0] twice\n", "plain\n"):
        lines.write(piece)
    assert out.writes == ["[rank 0] see [rank 0] [rank 1] and on\n", "[rank 0] [rank 0] twice\n", "plain\n"]


def test_a_full_disk_costs_a_line_and_not_the_next_ones() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it fails, too
    try:
        lines = WholeLines(full)
        assert lines.write("[rank 0] lost\n") == 14
        assert lines.write("[rank 0] lost, too\n") == 19
    finally:
        with contextlib.suppress(OSError):
            full.close()


def test_an_end_without_a_line_feed_is_sent_at_last_and_an_endless_line_is_not_kept() -> None:
    out = Recorder()
    lines = WholeLines(out)
    lines.write("[rank 0] killed here")
    assert out.writes == []
    lines.finish()
    lines.finish()
    assert out.writes == ["[rank 0] killed here\n"]
    lines.write("[rank 0] next\n")
    assert out.writes[1:] == ["[rank 0] next\n"]
    lines.write("\r50 %" * LIMIT)
    assert len(out.writes) == 3


def test_a_name_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    say("loss of \x1b[2J is not finite")
    told = capsys.readouterr().out + training("evaluate", "none\x1b[2J").output
    assert "\x1b" not in told and told.count("\\x1b[2J") == 2
