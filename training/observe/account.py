"""The account of a job's time, from the lines of its time.jsonl. Imports no torch.

The job's wall clock is that of rank 0, over all attempts. Every second of it is in exactly one category. A line has the seconds of each
category since the line before. Steps after the resume point count as lost: they are
`taken_again`. No line is ever changed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.wire.progress import stat_of

from .. import contract, files


class TimeCategory(str, Enum):
    """The categories of a second. If two apply, the first counts."""

    HANG = "hang"
    """Wait for a rank that never came: from the last step, or sign of life, to the end of the attempt."""
    REGROUP = "regroup"
    """Loss or replacement of a rank: from the last whole step until the others have met again."""
    TAKEN_AGAIN = "taken_again"
    """Steps that were lost with an attempt, after the checkpoint from which the next attempt resumed."""
    CHECKPOINT = "checkpoint"
    """Stop of the training to gather and copy a checkpoint, or to wait for the disk."""
    EVALUATION = "evaluation"
    """`evaluate`, `for_evaluation`, and the script's time between the last batch of an epoch and the first of the next."""
    RESTORED = "restored"
    """Verification of a checkpoint, its reading and its transfer to the ranks."""
    START = "start"
    """From the start of the launcher to the start of the rank's process."""
    IMPORTS = "imports"
    """From the start of the rank's process to its session."""
    MEETING = "meeting"
    """The rendezvous of the ranks."""
    PREPARED = "prepared"
    """Creation of data, model and optimizer."""
    FIRST_STEP = "first_step"
    """To the end of the attempt's first step, compiling included."""
    DATA_WAIT = "data_wait"
    """Steps: the wait for the next batch."""
    RANK_WAIT = "rank_wait"
    """Steps: from the rank's own gradients to the sum over all ranks."""
    PRODUCTIVE = "productive"
    """Steps: everything else."""
    ENDING = "ending"
    """From the last step, or the decision to leave, to the end of the attempt."""
    DOWN = "down"
    """From the last line of an attempt to the start of the next attempt, or to the end of the launcher."""
    UNKNOWN = "unknown"
    """Time without a line, or in which the machine slept."""


PRECEDENCE = {category: rank for rank, category in enumerate(TimeCategory)}
STEPS = (TimeCategory.PRODUCTIVE, TimeCategory.DATA_WAIT, TimeCategory.RANK_WAIT)
STARTING = (
    TimeCategory.START,
    TimeCategory.IMPORTS,
    TimeCategory.MEETING,
    TimeCategory.PREPARED,
    TimeCategory.RESTORED,
    TimeCategory.FIRST_STEP,
)
_LARGEST = 1e12
"""Limit of a number of seconds, steps or ranks: a larger one is damaged."""
_MAX_BYTES, _LINE_BYTES, _MAX_STRETCHES = 64 << 20, 1 << 14, 8192

Line = dict[str, Any]
"""Keys: time, attempt, boot, since, until, first, step, ranks, seconds; in an attempt's first line resumed, in its last line code."""


@dataclass(slots=True)
class Stretch:
    """A stretch of an attempt."""

    attempt: int
    first: int
    last: int
    """Steps of the run at the stretch's start (`first`) and end (`last`)."""
    ranks: tuple[int, int]
    """(ranks that train, ranks that were started)."""
    wall: float
    seconds: dict[TimeCategory, float]
    """Seconds by category. Their sum is `wall`."""


class Account:
    """The sum of a run's lines."""

    def __init__(self) -> None:
        self.stretches: list[Stretch] = []
        self.last: Line | None = None
        self.began: float | None = None
        """Start of the first attempt's launcher, in Unix seconds by its machine's clock; None: unknown."""

    def add(self, line: Line) -> None:
        """Adds a line of time.jsonl. Raises `ValueError` for an invalid line."""
        since, until, first, step = (_number(line.get(name)) for name in ("since", "until", "first", "step"))
        attempt, ranks, given = line.get("attempt"), line.get("ranks"), line.get("seconds")
        if not isinstance(given, Mapping) or not isinstance(ranks, Sequence) or len(ranks) != 2 or since > until:
            raise ValueError("no line of time.jsonl")
        seconds = {TimeCategory(name): _number(value) for name, value in given.items()}
        number, count = int(_number(attempt)), (int(_number(ranks[0])), int(_number(ranks[1])))
        if self.last is None and line.get("time") is not None:
            self.began = _number(line["time"]) - (until - since)
        last, self.last = self.last, line
        before = _number(last["until"]) if last is not None and last.get("boot") == line.get("boot") else since
        missing = 0.0 if last is None or last.get("code") == contract.EXIT_DONE else max(0.0, since - before)
        known = sum(seconds.values())
        wall = max(until - since + missing, known)
        seconds[TimeCategory.UNKNOWN] = seconds.get(TimeCategory.UNKNOWN, 0.0) + wall - known
        if line.get("resumed") is not None:
            self._lose(_number(line["resumed"]))
        self.stretches.append(Stretch(number, int(first), int(step), count, wall, seconds))
        if len(self.stretches) > _MAX_STRETCHES:
            self.stretches[: _MAX_STRETCHES // 2] = _joined(self.stretches[: _MAX_STRETCHES // 2])

    def _lose(self, resumed: float) -> None:
        """Counts the steps after `resumed` as lost."""
        for stretch in reversed(self.stretches):
            if stretch.last <= resumed and stretch.last > stretch.first:
                return
            if stretch.last > max(stretch.first, resumed):
                share = (stretch.last - max(stretch.first, resumed)) / (stretch.last - stretch.first)
                for category in STEPS:
                    lost = share * stretch.seconds.get(category, 0.0)
                    stretch.seconds[category] = stretch.seconds.get(category, 0.0) - lost
                    stretch.seconds[TimeCategory.TAKEN_AGAIN] = (
                        stretch.seconds.get(TimeCategory.TAKEN_AGAIN, 0.0) + lost
                    )
                stretch.last = max(stretch.first, int(resumed))

    @property
    def wall(self) -> float:
        return sum(stretch.wall for stretch in self.stretches)

    @property
    def seconds(self) -> dict[TimeCategory, float]:
        """Seconds of the job's wall clock, by category."""
        total: dict[TimeCategory, float] = defaultdict(float)
        for stretch in self.stretches:
            for category, value in stretch.seconds.items():
                total[category] += value
        return total

    @property
    def rank_seconds(self) -> dict[TimeCategory, float]:
        """Seconds of all ranks: rank 0's seconds times the ranks that train. Those of a lost rank without a replacement are `down`."""
        total: dict[TimeCategory, float] = defaultdict(float)
        for stretch in self.stretches:
            for category, value in stretch.seconds.items():
                total[category] += value * stretch.ranks[0]
            total[TimeCategory.DOWN] += stretch.wall * max(0, stretch.ranks[1] - stretch.ranks[0])
        return total

    @property
    def restarts(self) -> int:
        return max(0, len({stretch.attempt for stretch in self.stretches}) - 1)

    @property
    def lost_to_restarts(self) -> float:
        """Seconds that restarts cost: down, taken again, and the time to the first step of every attempt but the first."""
        begun = min((stretch.attempt for stretch in self.stretches), default=0)
        again = [TimeCategory.DOWN, TimeCategory.TAKEN_AGAIN]
        return sum(
            stretch.seconds.get(category, 0.0)
            for stretch in self.stretches
            for category in (again if stretch.attempt == begun else [*again, *STARTING])
        )

    def shares(self) -> dict[str, Any]:
        """Returns the shares for status.json."""
        return {**_shares([self]), **({"began": round(self.began, 3)} if self.began is not None else {})}

    def plain(self) -> dict[str, Any]:
        """Returns the shares and seconds for summary.json."""
        return plain([self])


def _shares(accounts: Sequence[Account]) -> dict[str, Any]:
    wall = max(sum(account.wall for account in accounts), 1e-9)
    productive = sum(account.seconds[TimeCategory.PRODUCTIVE] for account in accounts)
    lost = sum(account.lost_to_restarts for account in accounts)
    return {
        "fraction": round(productive / wall, 4), "lost_to_restarts": round(lost / wall, 4),
        "restarts": sum(account.restarts for account in accounts),
    }  # fmt: skip


def plain(accounts: Sequence[Account]) -> dict[str, Any]:
    """Returns the shares and seconds of several runs together."""
    wall = sum(account.wall for account in accounts)
    seconds, rank_seconds = (
        {category.value: round(sum(run[category] for run in each), 3) for category in TimeCategory}
        for each in ([account.seconds for account in accounts], [account.rank_seconds for account in accounts])
    )
    return {**_shares(accounts), "wall_seconds": round(wall, 3), "seconds": seconds, "rank_seconds": rank_seconds}


def launcher_ended(run: Path) -> None:
    """Adds a line for the time between rank 0's last line and the end of the launcher, when no rank runs. Raises `OSError`."""
    last, now = of_run(run).last, boot_seconds()
    if last is None or last.get("boot") != boot() or not (started("self") or now) < last["until"] < now:
        return  # no rank of this launcher has written it
    category = TimeCategory.ENDING if "code" in last else TimeCategory.DOWN
    line = {name: value for name, value in last.items() if name != "resumed"}
    line |= {"time": round(time.time(), 3), "since": last["until"], "until": round(now, 4), "first": last["step"]}
    files.append(run / contract.TIME_FILE, {**line, "seconds": {category.value: round(now - last["until"], 4)}})


def boot_seconds() -> float:
    """Returns the seconds since the boot of the machine, including sleep if the system has such a clock (Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot() -> str:
    """Returns an id of the clock of `boot_seconds`: the machine's boot, and the namespace of its clocks."""
    number = clocks = ""
    with contextlib.suppress(OSError):
        number = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        clocks = os.readlink("/proc/self/ns/time").removeprefix("time:").strip("[]")
    return f"{number}/{clocks}"


def started(process: str) -> float | None:
    """Returns the start of a process ("self": the current process), by the clock of the boot; None: unknown."""
    fields = stat_of(process or "-")
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if len(fields) > 19 else None


def _joined(stretches: list[Stretch]) -> list[Stretch]:
    """Returns at best half as many stretches: it joins pairs of neighbours of the same attempt and ranks."""
    joined: list[Stretch] = []
    whole = True
    for stretch in stretches:
        last = joined[-1] if joined else stretch
        if whole or (last.attempt, last.ranks) != (stretch.attempt, stretch.ranks):
            joined.append(stretch)
            whole = False
            continue
        last.last, last.wall, whole = stretch.last, last.wall + stretch.wall, True
        for category, value in stretch.seconds.items():
            last.seconds[category] = last.seconds.get(category, 0.0) + value
    return joined


def _number(value: Any) -> float:
    """Returns a number from 0 to `_LARGEST`. Raises `ValueError` for another value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _LARGEST:
        raise ValueError(f"no number of seconds, steps or ranks: {value!r}")
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
