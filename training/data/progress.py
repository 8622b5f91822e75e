"""Progress of a long preparation of data: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.training.contract import say

SECONDS = 10.0
"""Between two lines."""


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives a function to be called once for each of `total` things that are done. On stderr."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda: bar.advance(task)
        return
    done, next_line = 0, time.monotonic() + SECONDS

    def one_more() -> None:
        nonlocal done, next_line
        done += 1
        if time.monotonic() > next_line:
            next_line = time.monotonic() + SECONDS
            say(f"{title}: {done} of {total}", sys.stderr)

    yield one_more
