"""Reports about jobs: status, exit codes of `lockstep`, the checks of `doctor`, and how a terminal shows them.

A terminal is shown text without control codes, small tables, and JSON with stable fields.
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
"""Exit codes of several jobs: the first of these that occurs is that of all."""


Result = Literal["ok", "note", "missing", "warning", "cannot tell"]
"""`note`: no job needs it. `cannot tell`: the rights to look are not there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of what `lockstep doctor` reports."""

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
        """Its ranks, for people."""
        if not self.ranks:
            return "?"
        return str(self.ranks[0]) if len(self.ranks) == 1 else f"{self.ranks[0]}–{self.ranks[-1]}"


@dataclass(frozen=True, slots=True)
class Status:
    """Where a job stands. `reason` says why in one sentence; `exit_code` is the job's own, None while it runs."""

    state: State
    reason: str
    ranks: list[NodeStatus] = field(default_factory=list)
    exit_code: int | None = None
    goodput: dict[str, Any] | None = None
    """The goodput of the run, over all attempts: `fraction`, `lost_to_restarts`, `restarts`; None: it is not known. If the run has begun
    in this job: `before_start`, seconds since the submission, and `queued`, those until it had its machines."""
    slow_rank: dict[str, Any] | None = None
    """That the others wait for: `rank`, `phase`, `share` of every step; None where there is none."""

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
        """Whether a wait returned this before the job ended. One that cannot be scheduled does not count."""
        return not self.final and self.state != "unschedulable"

    @property
    def unreachable_node(self) -> str:
        """Why this may be out of date: a node that does not answer; "" where all do."""
        return next((part.reason for part in self.ranks if part.state == "unknown"), "")

    def line(self, name: str) -> str:
        """For people, one line."""
        return f"{name}: {self.state}{f' – {self.reason}' if self.reason else ''}"

    def lines(self, name: str) -> list[str]:
        """For people: the line, the goodput, the slow rank, and, with several nodes, a table."""
        lines = [self.line(name)]
        lines += [goodput_line(self.goodput)] if self.goodput is not None else []
        lines += [slow_rank_line(self.slow_rank)] if self.slow_rank is not None else []
        if len(self.ranks) > 1:
            head = ("NODE", "RANKS", "STATE", "RESTARTS", "REASON")
            lines += columns(
                head, [(one.name, one.span, one.state, str(one.restarts), one.reason) for one in self.ranks]
            )
        return lines

    def absent(self, rank: int) -> str:
        """Why a rank does not run, as the end of a sentence about its job; "" where it may run."""
        why = f" ({self.reason})" if self.reason else ""
        if self.final:
            return f"has ended: {self.state}{why}; its ranks are gone"
        own = [part for part in self.ranks if rank in part.ranks]
        if any(part.state == "running" for part in own):
            return ""
        if self.state not in ("running", "restarting"):
            return f"has not started: {self.state}{why}; wait until it runs"
        ended = next((part for part in own if part.state in FINAL), None)
        return f"continues without rank {rank}: {ended.name} has {ended.state}" if ended is not None else ""

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
    """`created` is False where the same job was there already; `restarted` names the nodes of it that were started again."""

    name: str
    created: bool
    where: str
    restarted: tuple[str, ...] = ()

    def text(self) -> str:
        """For people, one line."""
        again = f"; started again: {', '.join(self.restarted)}" if self.restarted else ""
        return f"{self.name}: {'submitted' if self.created else f'is there already, with the same spec{again}'} ({self.where})"


StatusCallback = Callable[[Status], None]
"""Is called with each status on the way of a wait."""


class Unreachable(UserError):
    """The cluster does not answer. This may be temporary, so a wait continues. Exit code 69.

    Args:
        status: of the job, by what needs no answer.
    """

    def __init__(self, message: str, status: Status | None = None) -> None:
        super().__init__(message)
        self.status = status


class LoggedOut(Unreachable):
    """The login has expired. A wait under way continues: the user may log in again."""


_ANSWER_BY: ContextVar[float] = ContextVar("answer_by", default=math.inf)


@contextlib.contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """A question to a cluster that begins in the block ends by then, its retries included. It holds for this thread."""
    token = _ANSWER_BY.set(min(_ANSWER_BY.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _ANSWER_BY.reset(token)


def seconds_to_answer() -> float:
    """What is left of them."""
    return _ANSWER_BY.get() - time.monotonic()


def show(value: Any) -> None:
    """One JSON value on standard output, of plain values and data classes. Control codes are escaped by JSON itself."""
    print(json.dumps(value, indent=1, ensure_ascii=True, default=asdict), flush=True)


def say(text: str) -> None:
    """Prints one line, control codes made visible."""
    print(printable(text), flush=True)


def note(text: str) -> None:
    """Prints a note to stderr, apart from the answer."""
    to_stderr(text)


def warn(text: str) -> None:
    note(f"warning: {text}")


def columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table whose columns are as wide as their widest cell, control codes made visible."""
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
    """Returns a callback that prints each change of a job to stderr. A reason that differs in its numbers alone is progress."""
    last: tuple[str, str] | None = None

    def tell(status: Status) -> None:
        nonlocal last
        now = (status.state, re.sub(r"\d+", "0", status.reason))
        if now != last and not status.final:
            note(status.line(name))
        last = now

    return tell
