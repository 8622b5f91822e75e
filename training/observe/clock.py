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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

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


class StepClock:
    """Seconds of the last step by phase. The clock is injected, so that tests need not wait."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._closed: list[Times] = []
        self._between = 0.0
        """Own time since the last step."""
        self._ended: float | None = None
        """When that was closed; None while one is open."""
        self.trained = 0.0
        """Seconds of training so far, evaluation and saving excluded; continues over restarts."""
        self.begin()

    def begin(self) -> None:
        self._begin = self._data = self._grad = self._synced = self._now()
        self._waited, self._ended = 0.0, None

    def between(self) -> None:
        """The script comes back for the next batch: what it did since the last step was its own, or since the last batch
        where that brought no step."""
        now = self._now()
        self._between += now - (self._begin if self._ended is None else self._ended)
        self._ended = now

    def data_ready(self) -> None:
        self._data = self._grad = self._synced = self._now()

    def grad_ready(self, at: Mark | None = None) -> None:
        """The rank's own gradients are complete (now, or at a `mark` noted before): from here on it waits for others."""
        self._grad = self._synced = at if isinstance(at, float) else self._now()

    def waited(self, since: Mark, until: Mark) -> None:
        """Before `grad_ready` the rank waited for others, too, between two marks: moves that to `sync_wait`."""
        if isinstance(since, float) and isinstance(until, float):
            self._waited += until - since

    def synced(self) -> None:
        self._synced = self._now()

    def replayed(self, points: RecordedPoints) -> None:  # noqa: ARG002 - a host's clock cannot look into a recording
        """The gradients of a recorded step are launched. What the clock cannot see of it counts as the rank's own time."""
        self.grad_ready()
        self.synced()

    def before_replay(self) -> None:
        """Saves the times of the last replay, because the next replay records its events anew."""

    @contextlib.contextmanager
    def synchronizing(self, watch: Watch | None) -> Iterator[None]:
        """Around a strategy's `synchronize`, with its `watch`: marks `grad_ready` and `synced`.

        Where there is no watch, the rank's own gradients are complete when it is entered.
        """
        if watch is None:
            self.grad_ready()
        else:
            for since, until in watch.waits:
                self.waited(since, until)
            self.grad_ready(watch.complete)
        yield
        self.synced()

    def end(self) -> Times:
        """Closes the step. Returns its seconds as the host saw them."""
        now = self._now()
        self._ended = now
        times = {
            "data_wait": self._data - self._begin,
            "grad_ready": self._grad - self._data - self._waited + self._between,
            "sync_wait": self._synced - self._grad + self._waited,
            "step_duration": now - self._begin + self._between,
        }
        self.trained += times["step_duration"]
        self._begin = self._data = self._grad = self._synced = now
        self._between = self._waited = 0.0
        self._closed = [times]
        return times

    def settle(self) -> None:
        """Waits for the device, and counts that as training: steps end on the host when they are queued."""

    def measured(self) -> list[Times]:
        """The closed steps whose seconds have become known since the last call, oldest first."""
        closed, self._closed = self._closed, []
        return closed


class CudaStepClock(StepClock):
    """The same points as events in the GPU's stream: a phase lasts as long as the GPU worked or idled in it.

    `data_wait` is then the time that the GPU stood still for data, `sync_wait` the time that its stream waited for the
    collectives of the other ranks. A step becomes known a few steps later, when its last event has passed.
    """

    _POOL = 64

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._free: list[torch.cuda.Event] = []
        self._step = _Step()
        self._own_times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Where the script's own time since the last step began and ended."""
        self._pending: deque[_Step] = deque()
        self._replays: tuple[_Step, RecordedPoints] | None = None
        super().__init__(now)

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        super().begin()
        self._step = _Step([self._event()] * 4)

    def between(self) -> None:
        super().between()
        self._own_times.append((self._step.events[0], self._event()))

    def data_ready(self) -> None:
        super().data_ready()
        self._step.events[1:] = [self._event()] * 3

    def grad_ready(self, at: Mark | None = None) -> None:
        super().grad_ready(at)
        self._step.events[2:] = [self._event() if at is None or isinstance(at, float) else at] * 2

    def waited(self, since: Mark, until: Mark) -> None:
        if not isinstance(since, float) and not isinstance(until, float):
            self._step.waits.append((since, until))

    def synced(self) -> None:
        super().synced()
        self._step.events[3] = self._event()

    def replayed(self, points: RecordedPoints) -> None:
        super().replayed(points)
        self._replays = self._step, points

    def before_replay(self) -> None:
        if self._replays is not None:
            step, points = self._replays
            step.recorded = points.seconds_since(step.events[1])
            self._replays = None

    def end(self) -> Times:
        self._step.events.append(self._event())
        self._step.own_times, self._own_times = self._own_times, []
        self._pending.append(self._step)
        self._step = _Step(self._step.events[-1:] * 4)
        return super().end()

    def settle(self) -> None:
        began = self._now()
        torch.cuda.synchronize()
        self.trained += self._now() - began

    def measured(self) -> list[Times]:
        closed = []
        while self._pending and self._pending[0].events[-1].query():
            step = self._pending.popleft()
            if self._replays is not None and self._replays[0] is step:
                self.before_replay()
            closed.append(step.times())
            # The last event is where the next one begins, or its own time, so this step does not give it back.
            self._free += list(dict.fromkeys(step.events[:-1]))[: self._POOL - len(self._free)]
        return closed


@dataclass(slots=True)
class _Step:
    """The points of a step, as events: begin, data, grad_ready, synced, end."""

    events: list[torch.cuda.Event] = field(default_factory=list)
    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    own_times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    recorded: tuple[float, float] | None = None
    """Seconds to grad_ready and from there to synced, where the step is a recording's."""

    def times(self) -> Times:
        begin, data, grad, synced, end = self.events
        waited = sum(_seconds(since, until) for since, until in self.waits)
        between = sum(_seconds(since, until) for since, until in self.own_times)
        own_seconds, sync = self.recorded or (_seconds(data, grad) - waited, _seconds(grad, synced) + waited)
        return {
            "data_wait": _seconds(begin, data), "grad_ready": own_seconds + between, "sync_wait": sync,
            "step_duration": _seconds(begin, end) + between,
        }  # fmt: skip


def _seconds(first: torch.cuda.Event, second: torch.cuda.Event) -> float:
    return 0.0 if first is second else first.elapsed_time(second) / 1e3


def step_clock(device: torch.device) -> StepClock:
    return CudaStepClock() if device.type == "cuda" else StepClock()
