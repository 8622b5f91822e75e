"""The account of a job's time, from the lines of its time.jsonl. Imports no torch.

The job's wall clock is that of rank 0, over all attempts. Every second of it is in exactly one category. A line has the seconds of each
category since the line before, by a monotonic clock, and the time of day at its end. A gap between two lines is `down` before an
attempt, and `unknown` within one. Steps after the resume point count as lost: they are `taken_again`. No line is ever changed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.wire.progress import stat_of

from .. import contract, files


class TimeCategory(str, Enum):
    """The categories of a second. If two apply, the one that began last counts."""

    REGROUP = "regroup"
    """Loss or replacement of a rank: from the last whole step until the others have met again."""
    TAKEN_AGAIN = "taken_again"
    """Steps that were lost with an attempt, after the checkpoint from which the next attempt resumed, and the step that an error ended."""
    CHECKPOINT = "checkpoint"
    """Stop of the training to gather and copy a checkpoint, or to wait for the disk."""
    EVALUATION = "evaluation"
    """`evaluate`, `for_evaluation`, and the script's time between the last batch of an epoch and the first of the next."""
    START = "start"
    """From the start of the launcher to the end of the attempt's first step, with loading and compiling."""
    DATA_WAIT = "data_wait"
    """Steps: the wait for the next batch."""
    RANK_WAIT = "rank_wait"
    """Steps: from the rank's own gradients to the sum over all ranks."""
    PRODUCTIVE = "productive"
    """Steps: everything else."""
    ENDING = "ending"
    """From the last step, or the decision to leave, to the end of the attempt."""
    DOWN = "down"
    """From the last line of an attempt to the start of the next attempt, by the time of day."""
    UNKNOWN = "unknown"
    """Time without a line, or in which the machine slept."""


STEPS = (TimeCategory.PRODUCTIVE, TimeCategory.DATA_WAIT, TimeCategory.RANK_WAIT)
_LARGEST = 1e12
"""Limit of a number of seconds or steps: a larger one is damaged."""
_MAX_BYTES, _LINE_BYTES, _RECENT = 64 << 20, 1 << 14, 4096
"""Most bytes of the file and of a line, and most lines whose steps may count as lost later."""

Line = dict[str, Any]
"""Keys: time, attempt, first, step, seconds; in an attempt's first line resumed, in its last line code."""


@dataclass(slots=True)
class Stretch:
    """The steps of the run at a line's start (`first`) and end (`last`), and its seconds by category."""

    first: float
    last: float
    seconds: dict[TimeCategory, float]


class Account:
    """The sum of a run's lines."""

    def __init__(self) -> None:
        self.seconds: dict[TimeCategory, float] = defaultdict(float)
        """Seconds of the job's wall clock, by category."""
        self.lost_to_restarts = 0.0
        """Seconds that restarts cost: down, taken again, and the time to the first step of every attempt but the first."""
        self.attempts, self.restarts = set[int](), 0
        self.last: Line | None = None
        self._recent: deque[Stretch] = deque(maxlen=_RECENT)

    def add(self, line: Line) -> None:
        """Adds a line of time.jsonl. Raises `ValueError`, `KeyError`, `TypeError` for an invalid line."""
        ended, first, step, number = (_number(line.get(name)) for name in ("time", "first", "step", "attempt"))
        seconds = {TimeCategory(name): _number(value) for name, value in dict(line["seconds"]).items()}
        if self.last is not None and self.last.get("code") != contract.EXIT_DONE:
            gap = TimeCategory.UNKNOWN if number == self.last["attempt"] else TimeCategory.DOWN
            seconds[gap] = seconds.get(gap, 0.0) + max(0.0, ended - sum(seconds.values()) - self.last["time"])
        if line.get("resumed") is not None:
            self._lose(_number(line["resumed"]))
        self.last = line
        self.attempts.add(int(number))
        self.restarts = len(self.attempts) - 1
        of_restarts = [TimeCategory.DOWN, TimeCategory.TAKEN_AGAIN]
        if self.restarts:
            of_restarts.append(TimeCategory.START)
        self.lost_to_restarts += sum(seconds.get(category, 0.0) for category in of_restarts)
        for category, value in seconds.items():
            self.seconds[category] += value
        self._recent.append(Stretch(first, step, seconds))

    def _lose(self, resumed: float) -> None:
        """Counts the steps after `resumed` as lost."""
        for stretch in reversed(self._recent):
            if stretch.last <= resumed and stretch.last > stretch.first:
                return
            begin = max(stretch.first, resumed)
            if stretch.last > begin:
                share = (stretch.last - begin) / (stretch.last - stretch.first)
                for category in STEPS:
                    lost = share * stretch.seconds.get(category, 0.0)
                    stretch.seconds[category] = stretch.seconds.get(category, 0.0) - lost
                    self.seconds[category] = max(0.0, self.seconds[category] - lost)
                    self.seconds[TimeCategory.TAKEN_AGAIN] += lost
                    self.lost_to_restarts += lost
                stretch.last = begin

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    def shares(self) -> dict[str, Any]:
        """Returns the shares for status.json."""
        wall = max(self.wall, 1e-9)
        productive, lost = self.seconds[TimeCategory.PRODUCTIVE] / wall, self.lost_to_restarts / wall
        return {"fraction": round(productive, 4), "lost_to_restarts": round(lost, 4), "restarts": self.restarts}

    def plain(self) -> dict[str, Any]:
        """Returns the shares and seconds for summary.json."""
        seconds = {category.value: round(self.seconds[category], 3) for category in TimeCategory}
        return {**self.shares(), "wall_seconds": round(self.wall, 3), "seconds": seconds}


def together(accounts: Iterable[Account]) -> Account:
    """Returns the sums of several runs."""
    whole = Account()
    for account in accounts:
        for category, seconds in account.seconds.items():
            whole.seconds[category] += seconds
        whole.lost_to_restarts += account.lost_to_restarts
        whole.restarts += account.restarts
    return whole


def age_of(process: str) -> float | None:
    """Returns the seconds since the start of a process ("self": the current process); None: unknown."""
    fields = stat_of(process or "-")
    if len(fields) <= 19:
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def _number(value: Any) -> float:
    """Returns a number from 0 to `_LARGEST`. Raises `ValueError` for another value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LARGEST:
        raise ValueError(f"no number of seconds or steps: {value!r}")
    return float(value)


def of_run(run: Path) -> Account:
    """Returns the account of a run directory, without damaged or incomplete lines: their time is `unknown` or `down`."""
    account = Account()
    with contextlib.suppress(OSError), files.regular(run / contract.TIME_FILE) as file:
        while file.tell() < _MAX_BYTES and (text := file.readline(_LINE_BYTES)):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = files.parsed(text)
                if isinstance(line, dict):
                    account.add(line)
    return account
