"""When the loop saves, and what becomes of it. All ranks call the same methods at the same boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist

from training.checkpoint.interval import Interval
from training.checkpoint.state import gather
from training.checkpoint.store import SaveResult, Writer
from training.run.context import RunContext

LOOK_SECONDS = 0.25
"""While a save is waited for: between two checks whether it is time to leave."""


class _NoAnswer(Exception):
    """A save has not ended in time. A network disk's own `TimeoutError` is an answer: the save has failed."""


class Saver:
    """Decides that a checkpoint is due, gathers it, and counts the ones that the disk refused.

    Args:
        asked_to_leave: when this rank was asked to (`time.monotonic`), None: it was not. From then on a disk that does not
            answer is waited for no longer than the grace.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self, context: RunContext, asked_to_leave: Callable[[], float | None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._now = now
        self._asked_to_leave = asked_to_leave
        self._leaving_since: float | None = None
        settings = context.config.checkpoint
        self.context, self.settings, self._grace = context, settings, context.config.preempt.grace_seconds
        self.failures = 0
        self._writer = None
        if context.run is not None:
            self._writer = Writer(context.run.checkpoints, settings.keep, settings.keep_best)
        self._future: Future[SaveResult] | None = None
        self._last_step = context.steps_done
        self._last_time = now()
        history = context.state.history  # starts that were neither the first nor followed one that had saved
        self.interval = Interval(context.attempt - 1 - history.get("preemptions", 0))
        self._last_failed = self._hangs = False

    def due_by_step(self) -> bool:
        """Whether the step count asks for a save at this boundary: the same on every rank."""
        every, steps = self.settings.every_steps, self.context.steps_done
        return bool(every) and steps % every == 0 and steps > self._last_step

    @property
    def steps_since(self) -> int:
        """Steps since the last save, the same on every rank."""
        return self.context.steps_done - self._last_step

    def due_by_time(self) -> bool:
        """Whether this rank's clock asks for one: a wish, which the ranks agree on first."""
        every = self.settings.every_seconds
        if every == "auto":
            every = self.interval.seconds(self.context.state.clock.trained)
        return bool(every) and self.context.world.leader and self._now() - self._last_time >= every

    def save(self, score: float | None = None) -> None:
        """Gathers the state and hands it to the writer; the disk's part happens in the background. Collective."""
        self.context.state.clock.settle()
        began = time.perf_counter()
        self._reap()
        gathered = gather(self.context.state, everywhere=self.settings.write == "node")
        self._last_step, self._last_time = self.context.steps_done, self._now()
        if self._writer is not None and gathered is not None and not self._hangs:  # else it would wait behind that one
            self._future = self._writer.save(self.context.steps_done, gathered, score)
            stalled = time.perf_counter() - began
            self.interval.stalled(stalled)
            self.context.event("checkpoint", step=self.context.steps_done, stall_seconds=round(stalled, 6))

    def look(self) -> None:
        """Notes a save that has ended, without waiting for one that has not."""
        if self._future is not None and self._future.done():
            self._reap()

    def leaving(self) -> None:
        """The ranks have agreed to leave: every wait from here on ends with the grace."""
        self._leaving_since = self._leaving_since or time.monotonic()

    def durable(self) -> bool:
        """Waits for the last save; whether it is on the disk everywhere it should be. Collective."""
        self._reap()
        ok = torch.tensor(int(not self._last_failed))
        dist.all_reduce(ok, dist.ReduceOp.MIN)
        return bool(ok)

    def _result(self, future: Future[SaveResult]) -> SaveResult:
        """Waits for a save, on the way out no longer than the rest of the grace. Raises `_NoAnswer`, `OSError`."""
        while True:
            asked = [since for since in (self._asked_to_leave(), self._leaving_since) if since is not None]
            left = min(asked) + self._grace - time.monotonic() if asked else LOOK_SECONDS
            wait([future], max(0.0, min(left, LOOK_SECONDS)))
            if future.done():
                return future.result()
            if left <= LOOK_SECONDS and asked:
                raise _NoAnswer(f"the disk did not answer within the grace period of {self._grace:g} s")

    def _reap(self) -> None:
        """Notes what became of the last save. A disk that refuses costs this checkpoint, not the run."""
        if self._future is None:
            return
        try:
            result = self._result(self._future)
        except (OSError, _NoAnswer) as error:
            self._hangs = isinstance(error, _NoAnswer)
            self.context.metrics.checkpoint_failed("timeout" if self._hangs else "disk")
            self.failures += 1
            self._last_failed = True
            self.context.event("checkpoint_failed", reason=str(error), failures=self.failures)
            self.context.console.warn(f"a checkpoint could not be saved, the run continues: {error}")
        else:
            self._last_failed = self._hangs = False
            self.context.metrics.checkpoint_written(result.seconds)
            self.context.event(
                "checkpoint_written", path=result.path.name, seconds=round(result.seconds, 4), bytes=result.bytes
            )
            self.interval.written(result.seconds)
            self._tell_interval()
        self._future = None

    def _tell_interval(self) -> None:
        """Once, when the first save has been measured: what `every_seconds: auto` comes to."""
        found, trained = self.interval, self.context.state.clock.trained
        if self.settings.every_seconds != "auto" or found.told or not found.measured:
            return
        found.told = True
        seconds, mtbf = found.seconds(trained), found.mtbf(trained)
        self.context.event(
            "checkpoint_interval", seconds=round(seconds, 3), cost_seconds=round(found.cost, 6), mtbf_seconds=round(mtbf, 1),
            failures=found.failures,
        )  # fmt: skip
        self.context.console.line(
            f"Checkpoints every {seconds:.0f} s (every_seconds: auto): a save costs {found.cost:.3g} s, and a failure is "
            f"expected every {mtbf / 3600:.3g} h ({found.failures} so far)"
        )

    def close(self) -> None:
        """Sees the last save end, unless its time was over before: that one leaves a file that the next start removes."""
        if self._writer is not None:
            self._reap()
            if not self._hangs:
                self._writer.wait()
