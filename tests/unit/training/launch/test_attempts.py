"""What a node's count of restarts keeps through the endings that cost nothing."""

from __future__ import annotations

from pathlib import Path

from lockstep.training.launch.attempts import Attempts
from tests.product import EXIT_FAILED, EXIT_PREEMPTED


def _start(folder: Path) -> Attempts | None:
    """The next pod of the node; None where it may not start."""
    attempts = Attempts(folder, "n-0", limit=2)
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


def test_a_failure_and_a_preemption_in_turn(tmp_path: Path) -> None:
    for used, code in ((0, EXIT_FAILED), (1, EXIT_PREEMPTED), (1, EXIT_FAILED), (2, EXIT_PREEMPTED), (2, EXIT_FAILED)):
        attempts = _start(tmp_path)
        assert attempts is not None and attempts.used == used
        attempts.end(code)
    assert not list(tmp_path.glob("*.json")), "given up: the next job begins with a fresh count"
