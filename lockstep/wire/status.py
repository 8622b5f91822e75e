"""Entries of a run's status.json: the shares of its time, and the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.training.contract import printable

_LATEST = 2**36
"""Limit of a Unix time, in the year 4147: a larger number is damaged."""


def slow_rank_of(status: Any) -> dict[str, Any] | None:
    """Returns `slow_rank` of a run's status.json: `rank`, `phase`, and the `share` of every step that this rank costs.

    Returns None if there is no slow rank, or the entry is damaged.
    """
    match status:
        case {"slow_rank": {"rank": int(rank), "phase": str(phase), "share": int(share) | float(share)}}:
            sound = bool not in (type(rank), type(share)) and 0 <= rank < _LATEST and 0 <= share < _LATEST
            return {"rank": rank, "phase": phase, "share": share} if sound else None
    return None


def slow_rank_line(found: Mapping[str, Any]) -> str:
    """Returns a sentence about `slow_rank_of` a run's status.json."""
    return printable(f"rank {found['rank']}, in {found['phase']}: costs {100 * found['share']:.0f} % of every step")


def goodput_line(shares: Mapping[str, Any]) -> str:
    """Returns a sentence about `goodput` of a run's status.json, or of a job's status."""
    text = f"goodput {100 * shares['fraction']:.1f} %"
    if count := shares["restarts"]:
        text += f", {100 * shares['lost_to_restarts']:.1f} % lost to {count} restart{'s' if count > 1 else ''}"
    return text
