"""What a command says while it waits for a job, and whether the wait ended first."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lockstep.jobs.terminal import note

if TYPE_CHECKING:
    from lockstep.jobs.status import Observer, Status


def teller(name: str) -> Observer:
    """Says on stderr when a job that is waited for changes. A reason that differs in its numbers alone is progress."""
    last: tuple[str, str] | None = None

    def tell(found: Status) -> None:
        nonlocal last
        now = (found.state, re.sub(r"\d+", "0", found.reason))
        if now != last and not found.final:
            note(line(name, found))
        last = now

    return tell


def line(name: str, found: Status) -> str:
    return f"{name}: {found.state}{f' – {found.reason}' if found.reason else ''}"


def unfinished(found: Status) -> bool:
    """Whether a wait that gave this ended before the job; that one cannot start is an answer of its own."""
    return not found.final and found.state != "unschedulable"
