"""Several ranks' endings become one exit code, and a node's count of restarts outlives the endings that cost nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lockstep.training import files
from lockstep.training.launch.ending import Attempts, deaths, exit_code
from tests.product import EXIT_PREEMPTED


def test_wrong_usage_beats_preempted_beats_failed() -> None:
    """The ranks end at the same moment, which a real launcher seldom sees."""
    assert [exit_code(codes) for codes in ([1], [-9, 75], [75, 2, 1], [-11])] == [1, 75, 2, 1]


def test_ranks_that_ended_alike_are_one_sentence_and_who_was_killed_comes_first() -> None:
    sentences = deaths({0: 1, 1: -11, 2: 1, 3: 75}, None, ours=False)
    assert sentences == ["rank 1 was ended by SIGSEGV", "rank 0, 2 ended with exit code 1"]


def _start(folder: Path) -> Attempts | None:
    """Starts the next pod of the node; returns None if it may not start."""
    attempts = Attempts(folder, limit=2)
    return attempts if attempts.begin() else None


def test_a_preemption_neither_costs_a_restart_nor_forgets_the_ones_before(tmp_path: Path) -> None:
    """Killed, preempted, and so on in turn: the third kill is one too many."""
    for killed in range(3):
        struck = _start(tmp_path)
        assert struck is not None and struck.used == killed
        if killed < 2:  # left without a word; its successor is preempted
            saved = _start(tmp_path)
            assert saved is not None and saved.used == killed + 1
            saved.end(EXIT_PREEMPTED)
    assert _start(tmp_path) is None


def test_a_full_disk_below_the_count_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = _start(tmp_path)
    assert started is not None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "publish", full)
    started.restarted()
    assert started.left == 1 and "warning: cannot count restarts" in capsys.readouterr().err
