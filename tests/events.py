"""Reads a run's events.jsonl, also while the run is writing, its summary.json, its status.json and its time.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import product

STARTED_SECONDS = 0.5
"""Seconds that a launcher takes to start."""


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """Returns the events of these kinds; of all kinds without one. Skips a last line that is still being written."""
    path = run_dir / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    entries = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [event for event in entries if not kinds or event["event"] in kinds]


def summary_of(run_dir: Path) -> dict[str, Any]:
    """Returns the summary that a run writes at its end."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def status_of(run_dir: Path) -> dict[str, Any]:
    """Returns a run's status."""
    status: dict[str, Any] = json.loads((run_dir / "status.json").read_text())
    return status


def weights_digest(run_dir: Path) -> str:
    """Returns the sha256 of the weights at the end of a run."""
    return str(summary_of(run_dir)["weights_sha256"])


def assert_adds_up(run_dir: Path, began: float | None = None, unknown: float = 0.02) -> None:
    """Every second of the job is in one bucket, and next to none is unknown.

    Args:
        began: when its launcher was started (`time.time`), if that has ended, and was the only one. The clock outside stops at the
            launcher's last line: after that the interpreter ends.
        unknown: largest share of time that is unknown.
    """
    account = product.goodput(run_dir)
    seconds = account.seconds
    assert sum(seconds.values()) == pytest.approx(account.wall, rel=0.001), seconds
    assert all(value >= 0 for value in seconds.values()), seconds
    assert seconds["unknown"] <= unknown * account.wall, seconds
    if began is not None:
        outside = (run_dir / "time.jsonl").stat().st_mtime - began
        assert 0.99 * outside - STARTED_SECONDS <= account.wall <= outside + 0.1, (outside, seconds)
