"""Counts this rank's seconds: each is in one `TimeCategory` of `account.py`. Rank 0 appends the sums to time.jsonl.

    goodput = GoodputRecorder(environment)      # on every rank, from the start of its process.
    goodput.enter(TimeCategory.ENDING)          # from here on the attempt ends.
    with goodput.on(TimeCategory.CHECKPOINT): … # the block saves.
    goodput.step_done(step, measured)           # moves the waits of the step out of `productive`.
    goodput.end(0)

The sums use a monotonic clock. The time of day tells how far two lines are apart. A kill loses the seconds since the last line; the
next attempt counts them as `down`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from .. import contract
from ..limits import MAX_LINE_SECONDS, MIN_LINE_SECONDS
from .account import Account, TimeCategory, age_of, of_run
from .steps import Times

if TYPE_CHECKING:
    from .rundir import RunDirectory

SHARE = 0.01
"""Time between two lines, as a fraction of the attempt so far, within the bounds of `limits`."""


class GoodputRecorder:
    """The seconds of this rank by category, from the start of its process. Rank 0 writes them once it has the run directory.

    Args:
        env: the environment; `contract.ENV_LAUNCHER` names the launcher's process, if there is one.
    """

    _free_since: float | None = None
    """End of this process's last session (monotonic): earlier seconds are counted already. None: this is the first."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._last, free = time.monotonic(), GoodputRecorder._free_since
        age = (age_of("self") or 0.0) if free is None else self._last - free
        launcher = age_of(env.get(contract.ENV_LAUNCHER, "")) if free is None else None
        self._began = self._last - age
        self._bucket = TimeCategory.START
        """The category that the seconds since `_last` belong to."""
        self._seconds: dict[TimeCategory, float] = defaultdict(float)
        self._seconds[TimeCategory.START] = age
        self._launching = max(0.0, (launcher or 0.0) - age)
        """Seconds from the start of the launcher to that of this process."""
        self._due = math.inf
        self._step_at = self._last
        self._first = self._step = 0
        self._attempt, self._resumed = 1, 0
        self.account = Account()
        self._run: RunDirectory | None = None
        self.count: Callable[[TimeCategory, float], None] = lambda *_: None
        """Adds the seconds of a category to the metrics, called for each category of a line. `Run` sets it."""

    # What the rank does.

    def enter(self, category: TimeCategory) -> None:
        """Counts the seconds from now on in this category."""
        self._tick()
        self._bucket = category

    @contextlib.contextmanager
    def on(self, category: TimeCategory) -> Iterator[None]:
        """Counts the block's seconds in this category."""
        before = self._bucket
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def train(self) -> None:
        """Counts seconds as productive when the batches of an epoch begin. An attempt starts until its first step is done."""
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
        self._bucket, self._step, self._step_at = TimeCategory.PRODUCTIVE, step, self._last
        self.alive()

    def alive(self) -> None:
        """Closes the line if that is due."""
        if time.monotonic() >= self._due:
            self.close()

    def regrouped(self, seconds: float) -> None:
        """Counts the time in which the ranks met again: `seconds`, or in a step the whole time since the last step."""
        self._tick()
        if self._bucket is TimeCategory.PRODUCTIVE:
            seconds = max(seconds, self._last - self._step_at)
        self._move(seconds, TimeCategory.REGROUP, self._bucket)
        self.close()

    def failed(self) -> None:
        """Counts an error that ends the attempt: the step under way is lost."""
        self._tick()
        self._move(self._last - self._step_at, TimeCategory.TAKEN_AGAIN)

    def _tick(self) -> None:
        now = time.monotonic()
        self._seconds[self._bucket] += now - self._last
        self._last = now

    def _move(self, seconds: float, to: TimeCategory, of: TimeCategory = TimeCategory.PRODUCTIVE) -> None:
        seconds = max(0.0, min(seconds, self._seconds[of]))
        self._seconds[of] -= seconds
        self._seconds[to] += seconds

    # The lines of the file.

    def begin(self, attempt: int, step: int) -> None:
        """Begins the lines of an attempt that continues after this step."""
        self._attempt, self._resumed, self._first, self._step = attempt, step, step, step
        self._due = 0.0

    def attach(self, run: RunDirectory) -> None:
        """Makes this rank, rank 0, write its lines to the run directory from now on."""
        last = self._open(run)
        if last is None or time.time() - sum(self._seconds.values()) - self._launching >= last:
            # Else the launcher has started an earlier attempt, too.
            self._seconds[TimeCategory.START] += self._launching
        self.close(resumed=True)

    def _open(self, run: RunDirectory) -> float | None:
        """Returns the end of the last line in the file, in Unix seconds; None: there is none."""
        self._tick()
        self._run, self.account = run, of_run(run.path)
        run.goodput = self.account.shares
        return None if self.account.last is None else float(self.account.last["time"])

    def take_over(self, run: RunDirectory) -> None:
        """Continues the file of a lost rank 0, after the file's last line."""
        last, seconds = self._open(run), sum(self._seconds.values())
        since = seconds if last is None else max(0.0, time.time() - last)
        for category in self._seconds:
            self._seconds[category] *= min(1.0, since / max(seconds, 1e-9))

    def close(self, code: int | None = None, resumed: bool = False) -> None:
        """Ends a line, with the exit code if the attempt has ended. `resumed`: it is the first line of the attempt."""
        self._tick()
        line = {
            "time": round(time.time(), 4), "attempt": self._attempt, "first": self._first, "step": self._step,
            "seconds": {category.value: round(value, 4) for category, value in self._seconds.items() if value > 0},
            **({"resumed": self._resumed} if resumed else {}), **({"code": code} if code is not None else {}),
        }  # fmt: skip
        for category, value in self._seconds.items():
            self.count(category, value)
        self._first = self._step
        self._seconds.clear()
        self._due = self._last + min(max(SHARE * (self._last - self._began), MIN_LINE_SECONDS), MAX_LINE_SECONDS)
        if self._run is not None:
            self.account.add(line)
            self._run.time(line, waits=code is not None)

    def end(self, code: int | None) -> None:
        """Writes the last line of the attempt."""
        self.close(contract.EXIT_FAILED if code is None else code)
        GoodputRecorder._free_since = self._last
        self._run, self._due = None, math.inf
