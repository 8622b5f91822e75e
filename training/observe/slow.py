"""Which rank the others wait for, in which phase, and what it costs them.

    slow = SlowRank(world, news)        # an observer of each step, on every rank; calls `news()` where there is some
    slow.verdict                        # on rank 0: None, or Verdict(rank=3, phase="data", share=0.11)

A rank's *own* time of a step is what it needs from one sum over the ranks to its part of the next one: the rest of the step before,
the wait for data, and forward and backward. Waiting for others does not count (`clock.py`). A step costs the own time of the slowest
rank. Were that rank no slower than the second slowest one, the difference would be gained: that is what it *costs* in this step.

Where ranks are alike, chance makes each of them the slowest now and then. So what is said of a slow rank is its cost above the mean of
the others', over the newest looks. It is named only where it costs more than they do by more than chance explains.

It takes no collective. Once a second each rank leaves the times of its last steps in the store, and rank 0 reads those of all.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.distributed.distributed_c10d import _get_default_store

from ..limits import SLOW_LOOK_SECONDS
from ..parallel import stores
from ..parallel.world import World
from .clock import Observer, StepDone

PHASES: tuple[Literal["data", "compute", "update"], ...] = ("data", "compute", "update")
"""Of a rank's own time: waiting for its batch; forward and backward, with what a script does between two batches; the rest of the step."""
BLOCKS = 10
"""The newest ones, over which the cost of a rank is taken."""
MIN_SHARE = 0.03
"""Of every step, that a rank costs which is named. It is named until it costs half of that."""
ERRORS = 5.0
"""Standard errors that the cost of a rank must be above chance."""
_MAX_STEPS = 4096
"""That a rank leaves in the store."""
_HEAD = struct.Struct("<qq")
_LONGEST = 1e7
"""Seconds of a phase from here on are damaged."""
_ATTEMPTS = itertools.count()
"""Of this process, one for each of its script's Sessions."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank that costs the others."""

    rank: int
    """The number that it was started with."""
    phase: str
    """Of `PHASES`, the one in which it loses most against the second slowest."""
    share: float
    """Of every step that the last looks saw, by which this rank is later than the others, 0 to 1."""

    def plain(self) -> dict[str, Any]:
        """For status.json and events.jsonl."""
        return {**asdict(self), "share": round(self.share, 4)}


class SlowRank(Observer):
    """Of one attempt. Every rank has one; rank 0 has the verdict.

    Args:
        news: called where all ranks have been looked at, or the others are lost.
    """

    def __init__(self, world: World, news: Callable[[], None]) -> None:
        self._world, self._news = world, news
        self._key = f"lockstep/times/{next(_ATTEMPTS)}"  # a process may have several runs over one store
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=_MAX_STEPS)
        """Of the last steps: seconds of each of `PHASES`, and of the wait for the other ranks."""
        self._last = 0
        """The step of the newest row."""
        self._left: int = 0
        """How many rows were new when they were left in the store."""
        self._rest = 0.0
        self._due = time.monotonic() + SLOW_LOOK_SECONDS
        self._took: deque[float] = deque([0.0], maxlen=5)
        """Seconds of the last looks."""
        self._read = 0
        """The last step that was read of all ranks."""
        self.history = History([])

    @property
    def verdict(self) -> Verdict | None:
        return self.history.verdict

    def step_done(self, step: StepDone) -> None:
        if self._world.size == 1:
            others, self.history = self.history.ranks, History([])
            if others:
                self._news()
            return
        new = step.measured if self._last else step.measured[1:]  # the first step compiles, and warms up
        for times in new:
            data, compute, waited = (max(0.0, times[name]) for name in ("data_wait", "grad_ready", "sync_wait"))
            self._rows.append((data, compute, self._rest, waited))
            self._rest = max(0.0, times["step_duration"] - data - compute - waited)
        self._last, self._left = step.step - step.behind, self._left + len(new)
        began = time.monotonic()
        if began < self._due or not self._rows:
            return
        store: Any = _get_default_store()  # the stubs of torch know of texts alone
        if not store.has_extended_api():
            return  # a file, which would grow
        self._leave(store)
        looked = self._world.leader and self._look(store)
        # With many ranks it takes longer, and is done less often: what is missed is not counted. One look may have had to wait for a CPU.
        self._took.append(time.monotonic() - began)
        self._due = began + max(SLOW_LOOK_SECONDS, 500 * min(self._took))
        if looked:
            self._news()

    def _leave(self, store: Any) -> None:
        """The steps since the last time but one: each rank does this at another step, and what they leave has to overlap."""
        rows = np.array(self._rows, dtype="<f4")
        head = _HEAD.pack(self._world.initial_rank, self._last)
        store.set(f"{self._key}/{self._world.rank}", head + rows.tobytes())
        while len(self._rows) > self._left:
            self._rows.popleft()
        self._left = 0

    def _look(self, store: Any) -> bool:
        parsed = [_parsed(stores.read(store, f"{self._key}/{rank}")) for rank in range(self._world.size)]
        posts = [post for post in parsed if post is not None]
        if len(posts) < self._world.size:
            return False
        first = max(self._read, *(last - len(rows) for _, last, rows in posts))
        end = min(last for _, last, _ in posts)
        if first >= end:
            return False
        self._read = end
        times = np.stack([rows[len(rows) - (last - first) :][: end - first] for _, last, rows in posts], axis=1)
        numbers = [number for number, _, _ in posts]
        if numbers != self.history.ranks:  # ranks were lost, or have come
            verdict = self.history.verdict
            self.history = History(numbers, verdict if verdict is not None and verdict.rank in numbers else None)
        self.history.add(times[:, :, :-1], float(times.sum(axis=(0, 2)).mean()))
        return True


def _parsed(data: bytes) -> tuple[int, int, Floats] | None:
    """Number of the rank, the last step, rows; None for what no rank of ours has left there."""
    width = len(PHASES) + 1
    count, odd = divmod(len(data) - _HEAD.size, 4 * width)
    if odd or not 0 <= count <= _MAX_STEPS:
        return None
    number, last = _HEAD.unpack_from(data)
    rows = np.frombuffer(data, "<f4", offset=_HEAD.size).reshape(-1, width).astype(np.float64)
    sound = 0 <= number < 1 << 20 and len(rows) <= last < 1 << 60 and bool(((rows >= 0) & (rows < _LONGEST)).all())
    return (number, last, rows) if sound else None


class History:
    """The newest looks at the steps of an attempt, and what they say of its ranks.

    Args:
        ranks: their numbers, in the order of the times.
        verdict: what was said of them before.
    """

    def __init__(self, ranks: list[int], verdict: Verdict | None = None) -> None:
        self.ranks, self.verdict = ranks, verdict
        self._blocks: deque[tuple[float, Floats]] = deque(maxlen=BLOCKS)
        """Seconds of the steps of a look, and what each rank cost in them: seconds [ranks, phases]."""

    def add(self, own: Floats, seconds: float) -> None:
        """A block of steps.

        Args:
            own: seconds [steps, ranks, phases] of each rank's own time.
            seconds: that these steps took.
        """
        self._blocks.append((max(seconds, 1e-9), costs(own)))
        if len(self._blocks) == BLOCKS:
            self.verdict = self._judged()

    def _judged(self) -> Verdict | None:
        seconds = np.array([seconds for seconds, _ in self._blocks])
        by_phase = np.stack([costs for _, costs in self._blocks])
        above = over_the_others(by_phase.sum(axis=2))
        place = int(above.sum(axis=0).argmax())
        rank, gained, spent = self.ranks[place], above[:, place], seconds.sum()
        named = self.verdict is not None and self.verdict.rank == rank
        share = float(gained.sum() / spent)
        error = float(np.sqrt(((gained - share * seconds) ** 2).sum()) / spent)
        if share < (MIN_SHARE / 2 if named else MIN_SHARE) or not (named or share > ERRORS * error):
            return None
        return Verdict(rank, PHASES[int(by_phase[:, place].sum(axis=0).argmax())], share)


def costs(own: Floats) -> Floats:
    """What each rank costs the others.

    Args:
        own: seconds [steps, ranks, phases].

    Returns:
        Seconds [ranks, phases], over all steps: of the slowest rank of each step, by how much it was slower than the second slowest one.
        A phase in which it was quicker counts below zero.
    """
    total = own.sum(axis=2)
    slowest, steps = total.argmax(axis=1), np.arange(len(own))
    total[steps, slowest] = -np.inf
    lost = own[steps, slowest] - own[steps, total.argmax(axis=1)]
    found = np.zeros(own.shape[1:])
    np.add.at(found, slowest, lost)
    return found


def over_the_others(values: Floats) -> Floats:
    """[…, ranks]: each above the mean of the others. Between two ranks that is how much later one of them comes, on average."""
    ranks = values.shape[-1]
    above: Floats = (ranks * values - values.sum(axis=-1, keepdims=True)) / (ranks - 1)
    return above
