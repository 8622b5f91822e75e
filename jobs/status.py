"""Reports about jobs: status, exit codes of `lockstep`, the checks of `doctor`, and how a terminal shows them.

Terminals get text without control codes, small tables, and JSON with stable fields.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lockstep.training.contract import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_TIMED_OUT,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    UserError,
    printable,
    to_stderr,
)
from lockstep.wire.status import goodput_line, slow_rank_line

EXIT_UNSCHEDULABLE = 3
EXIT_LOST = 4

State = Literal[
    "pending", "queued", "unschedulable", "running", "restarting",
    "succeeded", "failed", "preempted", "cancelled", "timed_out", "lost",
]  # fmt: skip
FINAL = ("succeeded", "failed", "preempted", "cancelled", "timed_out", "lost")
RESUMABLE = ("preempted", "cancelled", "timed_out")
"""Endings after which the state is saved, so that the same job submitted again resumes."""
_CODES = {
    "succeeded": EXIT_DONE, "failed": EXIT_FAILED, "unschedulable": EXIT_UNSCHEDULABLE, "lost": EXIT_LOST,
    "preempted": EXIT_PREEMPTED, "cancelled": EXIT_PREEMPTED, "timed_out": EXIT_TIMED_OUT,
}  # fmt: skip

EXIT_PRECEDENCE = (
    EXIT_LOST, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_UNSCHEDULABLE, EXIT_TIMED_OUT, EXIT_PREEMPTED, EXIT_DONE,
)  # fmt: skip
"""Order of exit codes. The first code that one of several jobs has is the exit code of all."""


Result = Literal["ok", "note", "missing", "warning", "cannot tell"]
"""Result of a check. `note`: no job needs the feature. `cannot tell`: the rights to check are missing."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of `lockstep doctor`."""

    name: str
    result: Result
    detail: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node of the job."""

    name: str
    ranks: list[int]
    state: str
    reason: str = ""
    restarts: int = 0

    @property
    def span(self) -> str:
        """The node's ranks, for people."""
        if not self.ranks:
            return "?"
        return str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}–{self.ranks[-1]}"


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a job. `reason` explains the state in one sentence; `exit_code` is the job's own, None while the job runs."""

    state: State
    reason: str
    ranks: list[NodeStatus] = field(default_factory=list)
    exit_code: int | None = None
    goodput: dict[str, Any] | None = None
    """Goodput of the run, over all attempts: `fraction`, `lost_to_restarts`, `restarts`; None: not known."""
    slow_rank: dict[str, Any] | None = None
    """Rank that the others wait for: `rank`, `phase`, `share` of every step; None if no rank is slow."""

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def code(self) -> int:
        """The exit code of `lockstep status` and `lockstep wait`; 0 while the job is under way."""
        if self.state == "failed" and self.exit_code == EXIT_USAGE:
            return EXIT_USAGE
        return _CODES.get(self.state, EXIT_DONE)

    @property
    def unfinished(self) -> bool:
        """Whether a wait returned this status before the job ended. A job that cannot be scheduled does not count."""
        return not self.final and self.state != "unschedulable"

    @property
    def unreachable_node(self) -> str:
        """The reason why this status may be out of date: a node that does not answer; "" if all answer."""
        return next((part.reason for part in self.ranks if part.state == "unknown"), "")

    def line(self, name: str) -> str:
        """Returns one line for people."""
        return f"{name}: {self.state}{f' – {self.reason}' if self.reason else ''}"

    def lines(self, name: str) -> list[str]:
        """Returns lines for people: the state, the goodput, the slow rank, and, with several nodes, a table."""
        lines = [self.line(name)]
        lines += [goodput_line(self.goodput)] if self.goodput is not None else []
        lines += [slow_rank_line(self.slow_rank)] if self.slow_rank is not None else []
        if len(self.ranks) > 1:
            head = ("NODE", "RANKS", "STATE", "RESTARTS", "REASON")
            rows = [(one.name, one.span, one.state, str(one.restarts), one.reason) for one in self.ranks]
            lines += columns(head, rows)
        return lines

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "final": self.final}


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A row of `lockstep list`."""

    name: str
    state: State
    nodes: int
    created: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """The result of a submission. `created` is False if the same job existed; `restarted` names the job's nodes that were started again."""

    name: str
    created: bool
    where: str
    restarted: tuple[str, ...] = ()

    def text(self) -> str:
        """Returns one line for people."""
        again = f"; started again: {', '.join(self.restarted)}" if self.restarted else ""
        return f"{self.name}: {'submitted' if self.created else f'is there already, with the same spec{again}'} ({self.where})"


StatusCallback = Callable[[Status], None]
"""Callback that gets each status during a wait."""


class Unreachable(UserError):
    """An error for a cluster that does not answer. The outage may be temporary, so a wait continues. Exit code 69.

    Args:
        status: status of the job, from sources that need no answer.
    """

    def __init__(self, message: str, status: Status | None = None) -> None:
        super().__init__(message)
        self.status = status


class LoggedOut(Unreachable):
    """An error for an expired login. A wait continues: the user may log in again."""


_ANSWER_BY: ContextVar[float] = ContextVar("answer_by", default=math.inf)


@contextlib.contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """Ends every query to a cluster in the block after `seconds`, retries included. Applies to this thread."""
    token = _ANSWER_BY.set(min(_ANSWER_BY.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _ANSWER_BY.reset(token)


def seconds_to_answer() -> float:
    """Returns the seconds that are left for a query; infinite without `answered_within`."""
    return _ANSWER_BY.get() - time.monotonic()


def show(value: Any) -> None:
    """Prints one JSON value of plain values and data classes. JSON itself escapes control codes."""
    print(json.dumps(value, indent=1, ensure_ascii=True, default=asdict), flush=True)


def say(text: str) -> None:
    """Prints one line, with control codes made visible."""
    print(printable(text), flush=True)


note = to_stderr
"""Prints a note to stderr, apart from the answer."""


def warn(text: str) -> None:
    to_stderr(f"warning: {text}")


def columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table whose columns are as wide as their widest cell, with control codes made visible."""
    cells = [tuple(printable(cell) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]


def answer(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Prints the answer of a command: one JSON value, or the lines for people."""
    if as_json:
        show(value)
    for line in [] if as_json else lines:
        say(line)


def progress_printer(name: str) -> StatusCallback:
    """Returns a callback that prints each change of a job to stderr. If only the numbers of a reason differ, nothing is printed."""
    last: tuple[str, str] | None = None

    def tell(status: Status) -> None:
        nonlocal last
        now = (status.state, re.sub(r"\d+", "0", status.reason))
        if now != last and not status.final:
            to_stderr(status.line(name))
        last = now

    return tell
