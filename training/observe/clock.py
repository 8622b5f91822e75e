"""Where the time of a step goes. The points are marked by the loop; `synchronizing` stands around the sync strategy.

    begin ── data_wait ── data_ready ── forward + backward ── grad_ready ── sync_wait ── synced ── optimizer ── end

Where a batch has several updates, the next step begins where the last one ended, and has no wait for data.

What a loop of one's own does between two steps (`between`) is the rank's own time, too: it counts with `grad_ready` of the
next step, in which the others wait for it.

Step time alone hides a slow rank: all ranks wait for it and read the same. The time to `grad_ready` names it, less
what the rank waited for others on the way there.

On a GPU the host only queues work, and its clock says nothing of it: there the points are CUDA events, read when they
have passed. Nothing waits for them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

Times: TypeAlias = dict[str, float]
"""Seconds of one step: {data_wait, grad_ready, sync_wait, step_duration}."""
Mark: TypeAlias = "float | torch.cuda.Event"
"""A point in time: seconds of the host, or an event in the GPU's stream."""


def mark(device: torch.device) -> Mark:
    """This point of the rank's work, to be handed to a `StepClock` later."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(slots=True)
class StepDone:
    """A step that is done, for the observers of the attempt."""

    step: int
    """Optimizer steps of the run so far."""
    of_attempt: int
    """Those of this attempt."""
    epoch: int
    """Counts from 0."""
    measured: list[Times]
    """Seconds of each phase, of the steps whose times have become known. On a GPU these are steps before this one, whose events have
    passed by now."""
    behind: int
    """How many steps the newest of them lies before this one."""
    lr: float
    samples: int
    """Samples of this step that this rank trained on."""
    bytes_sent: int
    """Bytes of gradient that this rank has handed to collectives in this attempt so far."""


class Observer:
    """Observes an attempt: each step that is done, and the signs of life between two steps. Waits for nothing."""

    def step_done(self, step: StepDone) -> None:
        """A step is done."""

    def alive(self, steps: int, of_attempt: int) -> None:
        """The rank polls, or has ended a batch of an evaluation. Arguments as in `StepDone`."""


class Watch(Protocol):
    """What is known of a step whose strategy waits for other ranks before `synchronize` (`lockstep.training.sync.watch`)."""

    complete: Mark | None
    """When the rank's own gradients were complete."""
    waits: list[tuple[Mark, Mark]]
    """Waits for other ranks before that."""


class RecordedPoints:
    """`grad_ready` and `synced` inside a recorded step: events that are recorded anew at every replay."""

    def __init__(self, device: torch.device) -> None:
        self._events = (
            [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] if device.type == "cuda" else []
        )

    def mark(self, number: int) -> None:
        """While the step is recorded: point 0 or 1 is here."""
        if self._events:
            self._events[number].record()

    def seconds_since(self, data: torch.cuda.Event) -> tuple[float, float] | None:
        """(from `data` to grad_ready, from there to synced); None where the GPU is not that far."""
        if not self._events or not self._events[1].query():
            return None
        return _seconds(data, self._events[0]), _seconds(self._events[0], self._events[1])


@dataclass(slots=True)
class _Step:
    """The points of a step, and what else was noted of it."""

    points: list[Any]
    """begin, data, grad_ready, synced, end."""
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """For other ranks, before grad_ready."""
    between: list[tuple[Any, Any]] = field(default_factory=list)
    """The script's own time since the last step."""
    recorded: tuple[float, float] | None = None
    """Seconds to grad_ready and from there to synced, where the step is a recording's."""

    def mark(self, number: int, at: Mark) -> None:
        """This point is there; none of those after it can be earlier."""
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
    """Seconds of each step by phase, as the device saw them.

    On a GPU `data_wait` is the time that the GPU stood still for data, `sync_wait` the time that its stream waited for the
    collectives of the other ranks. Such a step becomes known a few steps later, when its last event has passed.
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
        """The script comes back for the next batch: what it did since the last step was its own, or since the last batch
        where that brought no step."""
        now, since = time.perf_counter(), self._step.points[0]
        self._between += now - self._since
        self._since = now
        self._mark(0)
        self._step.between.append((since, self._step.points[0]))

    def data_ready(self) -> None:
        self._mark(1)

    def grad_ready(self) -> None:
        """The rank's own gradients are complete: from here on it waits for others."""
        self._mark(2)

    def synced(self) -> None:
        self._mark(3)

    def replayed(self, points: RecordedPoints) -> None:
        """The gradients of a recorded step are launched. What the host's clock cannot see of it counts as the rank's own time."""
        self.grad_ready()
        self.synced()
        if self._device.type == "cuda":
            self._replayed = self._step, points

    def before_replay(self) -> None:
        """Saves the times of the last replay, because the next replay records its events anew."""
        if self._replayed is not None:
            step, points = self._replayed
            step.recorded = points.seconds_since(step.points[1])
            self._replayed = None

    @contextlib.contextmanager
    def synchronizing(self, watch: Watch | None) -> Iterator[None]:
        """Around a strategy's `synchronize`, with its `watch`: marks `grad_ready` and `synced`.

        Where there is no watch, the rank's own gradients are complete when it is entered.
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
        """Waits for the device, and counts that as training: steps end on the host when they are queued."""
        if self._device.type == "cuda":
            began = time.perf_counter()
            torch.cuda.synchronize()
            self.trained += time.perf_counter() - began

    @property
    def behind(self) -> int:
        """Closed steps whose seconds are not known yet."""
        return len(self._closed)

    def measured(self) -> list[Times]:
        """The closed steps whose seconds have become known since the last call, oldest first."""
        known = []
        while self._closed and (self._device.type != "cuda" or self._closed[0].points[4].query()):
            step = self._closed.popleft()
            if self._replayed is not None and self._replayed[0] is step:
                self.before_replay()
            known.append(step.times())
        return known


def _seconds(first: Any, second: Any) -> float:
    """Between two marks of one kind."""
    if first is second:
        return 0.0
    return float(second - first if isinstance(first, (int, float)) else first.elapsed_time(second) / 1e3)
