"""Counts this rank's seconds: each is in one `TimeCategory` of `account.py`. Rank 0 appends the sums to time.jsonl.

    goodput = GoodputRecorder(environment)      # on every rank, from the start of its process.
    goodput.enter(TimeCategory.MEETING)         # from here on the rank meets the others.
    with goodput.on(TimeCategory.CHECKPOINT): … # the block saves.
    goodput.step_done(step, measured)           # moves the waits of the step out of `productive`.
    goodput.end(0)

The sums use a monotonic clock, so a jump of the wall clock changes nothing. The clock of the boot measures the time between two
attempts of one boot. A kill loses the seconds since the last line; the next attempt counts them as `down`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .. import contract
from ..limits import HANG_SECONDS, MAX_LINE_SECONDS, MIN_LINE_SECONDS
from .account import PRECEDENCE, Account, Line, TimeCategory, boot, boot_seconds, of_run, started
from .steps import Times

if TYPE_CHECKING:
    from .rundir import RunDirectory

SHARE = 0.01
"""Time between two lines, as a fraction of the attempt so far, within the bounds of `limits`."""
_KEPT = 16
"""Lines that a rank other than 0 keeps, in case it takes rank 0's place."""


class GoodputRecorder:
    """The seconds of this rank by category, from the start of its process. Rank 0 writes them once it has the run directory.

    Args:
        env: the environment; `contract.ENV_LAUNCHER` names the launcher's process, if there is one.
    """

    _free_since = 0.0
    """End of this process's last session (clock of the boot, seconds): earlier seconds are counted already."""

    def __init__(self, env: Mapping[str, str]) -> None:
        now, self._last = boot_seconds(), time.monotonic()
        self._began = max(started("self") or now, GoodputRecorder._free_since)
        launcher = started(env.get(contract.ENV_LAUNCHER, ""))
        self._since = min(launcher or self._began, self._began) if not GoodputRecorder._free_since else self._began
        self._bucket = TimeCategory.IMPORTS
        """The category that the seconds since `_last` belong to."""
        self._seconds: dict[TimeCategory, float] = defaultdict(float)
        self._seconds[TimeCategory.START] = self._began - self._since
        self._seconds[TimeCategory.IMPORTS] = max(0.0, now - self._began)
        self._boot = boot()
        self._floor = 0.0
        """Lines of earlier attempts, or of a lost rank 0, cover the time up to here (clock of the boot, seconds)."""
        self._due = math.inf
        self._step_at = self._alive_at = self._last
        self._first = self._step = 0
        self._attempt, self._resumed = 1, 0
        self.ranks = (1, 1)
        self.account = Account()
        self._kept: deque[Line] = deque(maxlen=_KEPT)
        self._run: RunDirectory | None = None
        self.count: Callable[[TimeCategory, float], None] = lambda *_: None
        """Adds the seconds of a category to the metrics, called for each category of a line. `Run` sets it."""
        self._idle = False
        """Whether the run was complete before this attempt, which has made no step so far. No line is written then."""

    # What the rank does.

    def enter(self, category: TimeCategory) -> None:
        """Counts the seconds from now on in this category."""
        self._tick()
        self._bucket = category

    @contextlib.contextmanager
    def on(self, category: TimeCategory) -> Iterator[None]:
        """Counts the block's seconds in this category, unless the present category precedes it in `TimeCategory`."""
        before = self._bucket
        if PRECEDENCE[category] < PRECEDENCE[before]:
            self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def train(self) -> None:
        """Counts seconds as productive when the batches of an epoch begin. An attempt is in `first_step` until its first step is done."""
        if self._step > self._resumed:
            self.enter(TimeCategory.PRODUCTIVE)

    def step_done(self, step: int, measured: list[Times]) -> None:
        """Moves the waits that have become known with this step out of `productive`.

        Args:
            step: steps of the run, with this one.
            measured: times of the steps that have become known.
        """
        self._tick()
        if self._bucket is TimeCategory.PRODUCTIVE:
            for times in measured:
                self._move(times["data_wait"], TimeCategory.DATA_WAIT)
                self._move(times["sync_wait"], TimeCategory.RANK_WAIT)
        self._bucket, self._step, self._step_at, self._idle = TimeCategory.PRODUCTIVE, step, self._last, False
        self._look(self._last)

    def alive(self) -> None:
        """Closes the line if that is due."""
        self._look(time.monotonic())

    def regrouped(self, seconds: float, ranks: int) -> None:
        """Counts the time in which `ranks` ranks met again: `seconds`, or in a step the whole time since the last step."""
        self._tick()
        stepping = self._bucket is TimeCategory.PRODUCTIVE
        self._move(
            max(seconds, self._last - self._step_at) if stepping else seconds, TimeCategory.REGROUP, self._bucket
        )
        self.close()
        self.ranks = ranks, self.ranks[1]

    def failed(self, in_collective: bool) -> None:
        """Counts an error that ends the attempt. If a collective waited for more than `limits.HANG_SECONDS`, the time since the last sign
        of life is a hang: a killed rank ends a collective at once. Otherwise the step under way is lost."""
        self._tick()
        waited = self._last - self._alive_at
        if in_collective and waited > HANG_SECONDS:
            for category in (
                TimeCategory.PRODUCTIVE,
                TimeCategory.EVALUATION,
                TimeCategory.CHECKPOINT,
                TimeCategory.FIRST_STEP,
            ):
                waited -= self._move(waited, TimeCategory.HANG, category)
        else:
            self._move(self._last - self._step_at, TimeCategory.TAKEN_AGAIN)

    def _tick(self) -> None:
        now = time.monotonic()
        self._seconds[self._bucket] += now - self._last
        self._last = now

    def _move(self, seconds: float, to: TimeCategory, of: TimeCategory = TimeCategory.PRODUCTIVE) -> float:
        seconds = max(0.0, min(seconds, self._seconds[of]))
        self._seconds[of] -= seconds
        self._seconds[to] += seconds
        return seconds

    # The lines of the file.

    def begin(self, attempt: int, step: int, ranks: int) -> None:
        """Begins the lines of an attempt that continues after this step."""
        self._attempt, self._resumed, self._first, self._step, self.ranks = attempt, step, step, step, (ranks, ranks)
        self._due = 0.0

    def attach(self, run: RunDirectory) -> None:
        """Makes this rank, rank 0, write its lines to the run directory from now on."""
        self._open(run)
        last = self.account.last
        self._idle = last is not None and last.get("code") == contract.EXIT_DONE
        if (end := self._end_of(last)) is not None:
            if self._idle or end > self._began:
                self._floor = end
            else:
                self._seconds[TimeCategory.DOWN] += max(0.0, self._since - end)
                if end > self._since:  # the launcher's start was that of an earlier attempt
                    self._seconds[TimeCategory.DOWN] += self._seconds.pop(TimeCategory.START, 0.0) - (end - self._since)
                self._since = end
        self.close(resumed=True)

    def _open(self, run: RunDirectory) -> None:
        self._run, self.account = run, of_run(run.path)
        run.goodput = self.account.shares

    def take_over(self, run: RunDirectory) -> None:
        """Continues the file of a lost rank 0. First it writes the lines that this rank has kept since the file's last line."""
        self._open(run)
        self._floor = self._end_of(self.account.last) or 0.0
        while self._kept:
            self._put(self._kept.popleft())

    def close(self, code: int | None = None, resumed: bool = False) -> None:
        """Ends a line, with the exit code if the attempt has ended. `resumed`: it is the first line of the attempt."""
        self._tick()
        if self._idle:
            return
        now = boot_seconds()
        line = {
            "time": round(time.time(), 3), "attempt": self._attempt, "boot": self._boot, "since": round(self._since, 4),
            "until": round(now, 4), "first": self._first, "step": self._step, "ranks": list(self.ranks),
            "seconds": {category.value: round(value, 4) for category, value in self._seconds.items() if value > 0},
            **({"resumed": self._resumed} if resumed else {}), **({"code": code} if code is not None else {}),
        }  # fmt: skip
        for category, value in self._seconds.items():
            self.count(category, value)
        self._since, self._first = now, self._step
        self._seconds.clear()
        self._due = self._last + min(max(SHARE * (now - self._began), MIN_LINE_SECONDS), MAX_LINE_SECONDS)
        if self._run is None:
            self._kept.append(line)
        else:
            self._put(line)

    def end(self, code: int | None) -> None:
        """Writes the last line of the attempt."""
        self.close(contract.EXIT_FAILED if code is None else code)
        GoodputRecorder._free_since = boot_seconds()
        self._run, self._due = None, math.inf

    def _look(self, now: float) -> None:
        self._alive_at = now
        if now >= self._due:
            self.close()

    def _put(self, line: Line) -> None:
        """Writes a line, without the time that lines of others cover."""
        since, until = line["since"], line["until"]
        if until <= self._floor:
            return
        if since < self._floor:
            share = (until - self._floor) / (until - since)
            seconds = {name: round(share * value, 4) for name, value in line["seconds"].items()}
            line = {**line, "since": round(self._floor, 4), "seconds": seconds}
        self.account.add(line)
        assert self._run is not None
        self._run.time(line, waits="code" in line)

    def _end_of(self, line: Line | None) -> float | None:
        """Returns the end of a line, by the clock of this boot; None: unknown."""
        if line is None:
            return None
        if line.get("boot") == self._boot:
            return float(line["until"])
        ago = time.time() - line["time"] if isinstance(line.get("time"), (int, float)) else -1.0
        return boot_seconds() - ago if ago >= 0 else None
