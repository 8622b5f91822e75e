"""What a terminal may be shown: text without control codes, small tables, JSON with stable fields."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from lockstep.training.contract import printable, to_stderr

if TYPE_CHECKING:
    from lockstep.jobs.status import Observer, Status


def show(value: Any) -> None:
    """One JSON value on standard output. Control codes are escaped by JSON itself."""
    print(json.dumps(value, indent=1, ensure_ascii=True), flush=True)


def say(text: str) -> None:
    """Prints one line, control codes made visible."""
    print(printable(text), flush=True)


def note(text: str) -> None:
    """Beside the answer, so on stderr."""
    to_stderr(text)


def warn(text: str) -> None:
    note(f"warning: {text}")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints columns as wide as their widest cell, control codes made visible."""
    cells = [tuple(printable(cell) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(end="", flush=True)  # not sys.stdout.flush(): it is None where it is closed


def teller(name: str) -> Observer:
    """Says on stderr when a job that is waited for changes. A reason that differs in its numbers alone is progress."""
    last: tuple[str, str] | None = None

    def tell(found: Status) -> None:
        nonlocal last
        now = (found.state, re.sub(r"\d+", "0", found.reason))
        if now != last and not found.final:
            note(found.line(name))
        last = now

    return tell
