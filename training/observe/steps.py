"""The numbers of each step: seconds of its phases, the rank that the others wait for, its loss and its gradient's norm.

The loop marks the points of a step; `synchronizing` stands around the sync strategy.

    begin ── data_wait ── data_ready ── forward + backward ── grad_ready ── sync_wait ── synced ── optimizer ── end

If a batch has several updates, the next step begins at the end of the last one, and has no wait for data.

The time of a script between two steps (`between`) is the rank's own time, too. It counts with `grad_ready` of the next step, in which
the others wait for the rank.

On a GPU the host only queues work, so its clock does not measure a step. The points are CUDA events there, read when they have
passed. Nothing waits for them.

Step time alone hides a slow rank: all ranks wait for it and read the same. A rank's *own* time of a step reaches from one sum over the
ranks to its part of the next sum. It covers the rest of the step before, the wait for data, and forward and backward. Waiting for others
does not count. A step costs the own time of the slowest rank. Its difference from the own time of the second slowest rank is what the
slowest rank *costs* in this step.

    slow = SlowRank(world, news)        # on every rank; `step_done` after each step. It calls `news()` where there is some.
    slow.verdict                        # on rank 0: None, or Verdict(rank=3, phase="data", share=0.11).

Among equal ranks, chance makes each the slowest now and then. So the cost of a slow rank is its cost above the mean of the others', over
the newest looks. A rank is named only if this cost is more than chance explains. The check needs no collective. Once a second
each rank writes the times of its last steps into the store, and rank 0 reads the times of all ranks.

    reading.start(losses, names, norm, step=50)     # starts a sum over the ranks, and a copy to the host.
    for values in reading.poll(): …        # {"step": 50, "train_loss": …, "grad_norm": …}, once the copy has arrived.

The loop reads losses and norms every `log.every` steps. Neither the GPU nor a rank waits. Every rank calls `start` at the same steps.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..limits import SLOW_LOOK_SECONDS
from ..parallel import stores
from ..parallel.world import World
from ..sync.base import GradientWatch, Mark, mark

Times: TypeAlias = dict[str, float]
"""Seconds of one step: {data_wait, grad_ready, sync_wait, step_duration}."""


class RecordedPoints:
    """The points `grad_ready` and `synced` inside a recorded step: CUDA events, which every replay records again."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] if device.type == "cuda" else []
        )

    def mark(self, number: int) -> None:
        """Places point 0 or 1, while the step is recorded."""
        if self._events:
            self._events[number].record()

    def seconds_since(self, data: torch.cuda.Event) -> tuple[float, float] | None:
        """Returns seconds (from `data` to grad_ready, from grad_ready to synced); None: the GPU has not passed both."""
        if not self._events or not self._events[1].query():
            return None
        return _seconds(data, self._events[0]), _seconds(self._events[0], self._events[1])


@dataclass(slots=True)
class _Step:
    """The points of a step, its waits, and the script's time before it."""

    points: list[Any]
    """Marks of begin, data, grad_ready, synced, end."""
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """(start, end) of each wait for other ranks before grad_ready."""
    between: list[tuple[Any, Any]] = field(default_factory=list)
    """(start, end) of the script's own time since the last step."""
    recorded: tuple[float, float] | None = None
    """Seconds (to grad_ready, from grad_ready to synced) of a replayed step; None: the step was not replayed."""

    def mark(self, number: int, at: Mark) -> None:
        """Sets a point, and all later points, which cannot be earlier."""
        self.points[number:] = [at] * (_POINTS - number)

    def times(self) -> Times:
        begin, data, grad, synced, end = self.points
        waited, between = (sum(_seconds(*stretch) for stretch in some) for some in (self.waits, self.between))
        own_seconds, sync = self.recorded or (_seconds(data, grad) - waited, _seconds(grad, synced) + waited)
        return {
            "data_wait": _seconds(begin, data), "grad_ready": own_seconds + between, "sync_wait": sync,
            "step_duration": _seconds(begin, end) + between,
        }  # fmt: skip


_POINTS = 5


class StepClock:
    """Seconds of each step by phase, as the device measured them.

    On a GPU `data_wait` is the time in which the GPU was idle for lack of data. `sync_wait` is the time in which its stream waited for
    the collectives of other ranks. The times of such a step are known a few steps later, when its last event has passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step = _Step([mark(device)] * _POINTS)
        self._closed: deque[_Step] = deque()
        """Closed steps whose seconds `measured` has not returned yet."""
        self._replayed: tuple[_Step, RecordedPoints] | None = None
        self._since = time.perf_counter()
        """Start of the step under way, by the host's clock."""
        self._between = 0.0
        self.trained = 0.0
        """Seconds of training so far by the host's clock, evaluation and saving excluded; continues over restarts."""

    def _mark(self, number: int) -> None:
        self._step.mark(number, mark(self._device))

    def begin(self) -> None:
        self._step.waits.clear()
        self._since = time.perf_counter()
        self._mark(0)

    def between(self) -> None:
        """Counts the script's own time, when the script asks for the next batch: since the last step, or since the last batch if that had
        no step."""
        now, since = time.perf_counter(), self._step.points[0]
        self._between += now - self._since
        self._since = now
        self._mark(0)
        self._step.between.append((since, self._step.points[0]))

    def data_ready(self) -> None:
        self._mark(1)

    def grad_ready(self) -> None:
        """Marks that the rank's own gradients are complete, so that it waits for others from now on."""
        self._mark(2)

    def synced(self) -> None:
        self._mark(3)

    def replayed(self, points: RecordedPoints) -> None:
        """Marks that a replay of the gradients is launched. Time that the host's clock cannot see counts as the rank's own time."""
        self.grad_ready()
        self.synced()
        if self._device.type == "cuda":
            self._replayed = self._step, points

    def before_replay(self) -> None:
        """Reads the times of the last replay, because the next replay records its events again."""
        if self._replayed is not None:
            step, points = self._replayed
            step.recorded = points.seconds_since(step.points[1])
            self._replayed = None

    @contextlib.contextmanager
    def synchronizing(self, watch: GradientWatch | None) -> Iterator[None]:
        """Marks `grad_ready` and `synced` around a strategy's `synchronize`, with its `watch`.

        Without a watch, the rank's own gradients are complete at the start of the block.
        """
        if watch is None or watch.complete is None:
            self.grad_ready()
        else:
            self._step.mark(2, watch.complete)
        if watch is not None:
            self._step.waits += watch.waits  # before `grad_ready`: they belong to `sync_wait`
        yield
        self.synced()

    def end(self) -> None:
        """Closes the step."""
        self._mark(4)
        self._closed.append(self._step)
        self._step = _Step(self._step.points[4:] * _POINTS)
        now = time.perf_counter()
        self.trained += now - self._since + self._between
        self._since, self._between = now, 0.0

    def settle(self) -> None:
        """Waits for the device, and counts the wait as training: on the host a step ends when it is queued."""
        if self._device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize()
            self.trained += time.perf_counter() - began

    @property
    def behind(self) -> int:
        """Closed steps whose seconds are not known yet."""
        return len(self._closed)

    def measured(self) -> list[Times]:
        """Returns the times of the closed steps that have become known since the last call, oldest first."""
        known = []
        while self._closed and (self._device.type != "cuda" or self._closed[0].points[4].query()):
            step = self._closed.popleft()
            if self._replayed is not None and self._replayed[0] is step:
                self.before_replay()
            known.append(step.times())
        return known


def _seconds(first: Any, second: Any) -> float:
    """Returns the seconds between two marks of one kind."""
    if first is second:
        return 0.0
    return float(second - first if isinstance(first, (int, float)) else first.elapsed_time(second) / 1e3)


PHASES: tuple[Literal["data", "compute", "update"], ...] = ("data", "compute", "update")
"""Phases of a rank's own time: wait for its batch; forward, backward and the script between two batches; rest of the step."""
BLOCKS = 10
"""Number of newest blocks of steps that give the cost of a rank."""
MIN_SHARE = 0.03
"""Least fraction of a step that a named rank costs. The rank stays named until it costs half of it."""
ERRORS = 5.0
"""Least cost of a named rank above chance, in standard errors."""
_MAX_STEPS = 4096
"""Most steps that a rank writes into the store."""
_LONGEST = 1e7
"""Limit of a phase's seconds: a larger value is damaged."""
_KEY = "lockstep/times"
"""Beginning of the keys in the store of the process group, which each attempt opens anew."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A slow rank, which costs the others time."""

    rank: int
    """The initial number of the rank."""
    phase: str
    """The phase of `PHASES` in which the rank loses most against the second slowest rank."""
    share: float
    """The fraction of a step by which this rank is later than the others, 0 to 1, over the steps of the last looks."""

    def plain(self) -> dict[str, Any]:
        """Returns the verdict for status.json and events.jsonl."""
        return {**asdict(self), "share": round(self.share, 4)}


class SlowRank:
    """Finder of the rank that the others wait for, in one attempt. Every rank has an instance; rank 0 has the verdict.

    Args:
        news: called on rank 0 after each look at all ranks, or when all other ranks are lost.
    """

    def __init__(self, world: World, news: Callable[[], None]) -> None:
        self._world, self._news = world, news
        self._rows: deque[tuple[float, float, float, float]] = deque(maxlen=_MAX_STEPS)
        """A row for each of the last steps: the seconds of each of `PHASES`, and of the wait for the other ranks."""
        self._last = 0
        """The step of the newest row."""
        self._left: int = 0
        """Rows since the last write into the store."""
        self._rest = 0.0
        self._due = time.monotonic() + SLOW_LOOK_SECONDS
        self._took: deque[float] = deque([0.0], maxlen=5)
        """Seconds that the last looks took."""
        self._read = 0
        """The last step that rank 0 has read of all ranks."""
        self.history = History([])

    def step_done(self, last: int, measured: list[Times]) -> None:
        """Adds the times that have become known with a step, up to those of step `last`. Waits for nothing."""
        if self._world.size == 1:
            others, self.history = self.history.ranks, History([])
            if others:
                self._news()
            return
        new = measured if self._last else measured[1:]  # the first step compiles, and warms up
        for times in new:
            data, compute, waited = (max(0.0, times[name]) for name in ("data_wait", "grad_ready", "sync_wait"))
            self._rows.append((data, compute, self._rest, waited))
            self._rest = max(0.0, times["step_duration"] - data - compute - waited)
        self._last, self._left = last, self._left + len(new)
        began = time.monotonic()
        if began < self._due or not self._rows:
            return
        store: Any = _get_default_store()  # the stubs of torch know of texts alone
        self._leave(store)
        looked = self._world.leader and self._look(store)
        # With many ranks it takes longer, and is done less often: what is missed is not counted. One look may have had to wait for a CPU.
        self._took.append(time.monotonic() - began)
        self._due = began + max(SLOW_LOOK_SECONDS, 500 * min(self._took))
        if looked:
            self._news()

    def _leave(self, store: Any) -> None:
        """Writes the rows since the last write but one into the store. Ranks write at different steps, and their rows must overlap."""
        rows = np.array([(self._world.initial_rank, self._last, 0.0, 0.0), *self._rows])
        store.set(f"{_KEY}/{self._world.rank}", rows.tobytes())
        while len(self._rows) > self._left:
            self._rows.popleft()
        self._left = 0

    def _look(self, store: Any) -> bool:
        parsed = [_parsed(stores.read(store, f"{_KEY}/{rank}")) for rank in range(self._world.size)]
        posts = [post for post in parsed if post is not None]
        if len(posts) < self._world.size:
            return False
        ranks, ends = ([int(post[0, column]) for post in posts] for column in range(2))
        first = max(self._read, *(end - len(post) + 1 for end, post in zip(ends, posts)))
        count = min(ends) - first
        if count <= 0:
            return False
        self._read = first + count
        times = np.stack([post[len(post) - (end - first) :][:count] for end, post in zip(ends, posts)], axis=1)
        if ranks != self.history.ranks:  # ranks were lost, or have come
            verdict = self.history.verdict
            self.history = History(ranks, verdict if verdict is not None and verdict.rank in ranks else None)
        self.history.add(times[:, :, :-1], float(times.sum(axis=(0, 2)).mean()))
        return True


def _parsed(data: bytes) -> Floats | None:
    """Returns a rank's rows from the store: first its number and its last step, then a row per step. None: the bytes are no rows."""
    row = 8 * (len(PHASES) + 1)
    if len(data) % row or not row <= len(data) <= row * (_MAX_STEPS + 1):
        return None
    post: Floats = np.frombuffer(data).reshape(-1, len(PHASES) + 1)
    number, last = post[0, :2]
    sound = (
        0 <= number < 1 << 20
        and len(post) - 1 <= last < 1 << 53
        and bool(((post[1:] >= 0) & (post[1:] < _LONGEST)).all())
    )
    return post if sound else None


class History:
    """The newest looks at the steps of an attempt, and their verdict on its ranks.

    Args:
        ranks: initial numbers of the ranks, in the order of the times.
        verdict: the verdict on these ranks so far.
    """

    def __init__(self, ranks: list[int], verdict: Verdict | None = None) -> None:
        self.ranks, self.verdict = ranks, verdict
        self._blocks: deque[tuple[float, Floats]] = deque(maxlen=BLOCKS)
        """(seconds of the steps of a look, cost of each rank in them: seconds [ranks, phases])."""

    def add(self, own: Floats, seconds: float) -> None:
        """Adds a block of steps.

        Args:
            own: seconds [steps, ranks, phases] of each rank's own time.
            seconds: duration of these steps.
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
    """Returns the cost of each rank to the others.

    Args:
        own: seconds [steps, ranks, phases].

    Returns:
        Seconds [ranks, phases], over all steps: the lead of the second slowest rank over the slowest rank of each step. A phase in which
        the slowest rank was quicker counts below zero.
    """
    total = own.sum(axis=2)
    slowest, steps = total.argmax(axis=1), np.arange(len(own))
    total[steps, slowest] = -np.inf
    lost = own[steps, slowest] - own[steps, total.argmax(axis=1)]
    costs_of_ranks = np.zeros(own.shape[1:])
    np.add.at(costs_of_ranks, slowest, lost)
    return costs_of_ranks


def over_the_others(values: Floats) -> Floats:
    """Returns values […, ranks], each minus the mean of the others. For two ranks: how much later one comes than the other, on average."""
    ranks = values.shape[-1]
    above: Floats = (ranks * values - values.sum(axis=-1, keepdims=True)) / (ranks - 1)
    return above


@dataclass(slots=True)
class _Copy:
    """Numbers on their way to the host."""

    sums: torch.Tensor
    """float64 [2 + names]: the sum of losses, the number of samples, and other sums of the epoch so far."""
    names: Sequence[str]
    norm: torch.Tensor | None
    first_of_epoch: bool
    values: dict[str, Any]
    """Values of `start`, returned with the numbers."""
    is_here: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None
    """Waits for the numbers: the sum over the ranks, and on a GPU the copy. Raises `RuntimeError` if the sum failed."""


class LossReader:
    """Reader of the epoch's running sums as means since the last reading, over the samples of all ranks. The constructor is collective.

    Args:
        losses: float64 [2 + names], this rank's sums in the current epoch (`TrainState.losses`). A resumed run begins in the middle of
            an epoch, so the constructor reads them once.
        of_all: whether the sums are those of all ranks already.
    """

    def __init__(self, losses: torch.Tensor, world: World, of_all: bool = False) -> None:
        self._world, self._sums = world, world.size > 1 and not of_all
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        before = losses.cpu().clone()
        if self._sums:
            dist.all_reduce(before)
        self._before: list[float] = before.tolist()
        self._first = False
        self._copies: deque[_Copy] = deque()

    def new_epoch(self) -> None:
        """Notes that the sums start at zero again."""
        self._first = True

    @property
    def within_epoch(self) -> bool:
        """Whether the epoch had samples at the last reading. The same on all ranks."""
        return not self._first and self._before[1] > 0

    def start(self, losses: torch.Tensor, names: Sequence[str], norm: torch.Tensor | None, **values: Any) -> None:
        """Starts to read the sums and the norm, with their values after the work that is queued so far. Collective.

        Args:
            losses: sums of the current epoch, as in the constructor.
            names: names of the sums after the first two.
            norm: the gradient's norm, a scalar; None: not computed.
            values: values that `poll` yields with the reading.
        """
        sums = losses.clone()
        norm = None if norm is None else norm.detach().clone()
        copy = _Copy(sums, names, norm, self._first, values)
        summed = dist.all_reduce(sums, async_op=True) if self._sums else None
        if summed is not None:
            copy.is_here, copy.wait = summed.is_completed, summed.wait
        if self._stream is not None:  # a second stream waits for the other ranks; the training stream does not
            self._stream.wait_stream(torch.cuda.current_stream(self._world.device))
            with torch.cuda.stream(self._stream):
                if summed is not None:
                    summed.wait()
                copy.sums, copy.norm = _to_host(sums), None if norm is None else _to_host(norm)
                arrived = torch.cuda.Event()
                arrived.record()
                copy.is_here, copy.wait = arrived.query, arrived.synchronize
        self._copies.append(copy)
        self._first = False

    def poll(self, wait: bool = False) -> Iterator[dict[str, Any]]:
        """Yields the readings that have arrived, in order; with `wait`, all that `start` has begun.

        A reading has the `values` of `start`, `train_loss`, `train_NAME` and `grad_norm`. The first two are means over all ranks'
        samples since the last reading; None: there were no samples.
        """
        while self._copies and (wait or self._copies[0].is_here()):
            copy = self._copies.popleft()
            copy.wait()
            before = [] if copy.first_of_epoch else self._before
            self._before = copy.sums.tolist()
            # A start may return fewer names than the one before it.
            since = [now - then for now, then in zip(self._before, chain(before, repeat(0.0)))]
            yield {
                **copy.values,
                **means(copy.names, since),
                "grad_norm": None if copy.norm is None else float(copy.norm),
            }


def means(names: Sequence[str], sums: Sequence[float]) -> dict[str, float | None]:
    """Returns the means by their names in events: `train_loss`, and `train_NAME` for each other sum."""
    loss, samples, *others = sums
    return {
        f"train_{name}": mean_loss(total, samples)
        for name, total in zip(("loss", *names), (loss, *others), strict=True)
    }


def mean_loss(losses: float, samples: float) -> float | None:
    """Returns the mean of a sum of losses; None without samples: 0 would look like a perfect loss."""
    return losses / samples if samples > 0 else None


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(torch.cuda.current_stream(tensor.device))  # its memory is that of the stream that trains
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
