"""When the loop saves, and whether the save succeeded. All ranks call the same methods at the same boundaries.

`checkpoint.every_seconds: auto` takes the interval from Young's and Daly's formula and the run's own measurements. A save costs `cost`
seconds of training. A failure costs the work since the last save, half an interval on average. The sum of both is least at an
interval of √(2 · cost · MTBF), where MTBF is the mean time between failures.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ..checkpoint import store
from ..checkpoint.object_store import ObjectStore, TakenOver
from ..checkpoint.state import gather
from ..checkpoint.store import KeepBest, Rule, SaveResult, Writer
from ..contract import UserError, to_stderr
from ..limits import (
    BUCKET_LOOK_SECONDS,
    LAST_COMMIT_SECONDS,
    MAX_INTERVAL_SECONDS,
    MIN_INTERVAL_SECONDS,
    PRIOR_SECONDS,
    SAVE_LOOK_SECONDS,
)
from ..parallel.exchange import any_rank, failing_together
from ..parallel.worker import Worker
from .run import Run

WRITES = 2.0
"""An interval is at least this many times as long as the writing in the background, which takes part of the disk and the CPU."""
_LAST = 9
"""Number of last saves whose median counts."""
_SENDING = Worker("checkpoint-send")


class Interval:
    """The best seconds between two saves, so far.

    Args:
        failures: starts of the run so far that were killed, or ended with exit code 1.
    """

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self._costs: deque[float] = deque(maxlen=_LAST)
        self._writes: deque[float] = deque(maxlen=_LAST)

    def stalled(self, seconds: float) -> None:
        """Records how many seconds a save has stopped the training."""
        self._costs.append(max(0.0, seconds))

    def written(self, seconds: float) -> None:
        """Records how many seconds the writing in the background took."""
        self._writes.append(max(0.0, seconds))

    def seconds(self, trained: float) -> float:
        """Returns the seconds between two saves. `trained`: seconds of training so far, of all attempts."""
        cost, write = (statistics.median(some or [0.0]) for some in (self._costs, self._writes))
        mtbf = (PRIOR_SECONDS + max(0.0, trained)) / (1 + self.failures)
        best = math.sqrt(2 * cost * mtbf)
        least = max(MIN_INTERVAL_SECONDS, WRITES * write)
        return min(max(best, least), max(MAX_INTERVAL_SECONDS, least))


class Sender:
    """Sender of a run directory's checkpoints to the bucket, during the training: the newest first, then the best.

    It reads the checkpoints' files, so its memory holds only the parts under way. If the bucket is slower than the saves, a newer
    checkpoint replaces the waiting one: the training never waits for a bucket.
    """

    def __init__(self, objects: ObjectStore, directory: Path) -> None:
        self._objects, self._directory = objects, directory
        self._step = -1
        _SENDING.begin()

    def send(self, step: int, written: Future[SaveResult] | None = None) -> Future[list[SaveResult]]:
        """Sends the newest and the best checkpoint in the background, once the save of `step` is written.

        Returns:
            A future of the checkpoints that were sent; none if nothing was new, or a newer checkpoint waits by then.
            It raises `OSError` if a checkpoint could not be sent, `TakenOver` if nothing can be sent any more.
        """
        self._step = step
        return _SENDING.run(self._send, step, written)

    def _send(self, step: int, written: Future[SaveResult] | None) -> list[SaveResult]:
        if written is not None:
            wait([written])
        sent = list[SaveResult]()
        for path in store.retained(store.candidates(self._directory), 1, self._objects.keep_best):
            began = time.perf_counter()
            try:
                size = self._objects.commit(path) if step == self._step else 0
            except FileNotFoundError:
                if step == self._step:
                    raise
                break  # it has made room for the newer one
            if size:
                sent.append(SaveResult(path, time.perf_counter() - began, size))
        return sent


class Scores:
    """The scores of one attempt that this rank knows.

    Args:
        history: the run's, which goes into every checkpoint. It holds the best scores so far (`best_NAME`), and the best that
            a checkpoint was saved with (`saved_NAME`). The weights of a score may be gone before they can be saved.
    """

    def __init__(self, history: dict[str, Any], keep_best: KeepBest) -> None:
        self.rule, self._history, self._keeps = Rule.of(keep_best), history, keep_best is not False
        self._step, self._value = -1, math.nan
        """The last score, and the step after which it was measured."""
        self._new = self._unsaved = False
        """Whether the last score came after the last boundary; whether it is better than that of any checkpoint."""

    def note(self, numbers: Mapping[str, float], step: int) -> None:
        """Records scores among the numbers that were measured on the weights after `step`."""
        for rule in (self.rule, Rule.of(True)):  # the best accuracy is reported, whatever is kept
            if rule.name in numbers:
                self._raise("best", rule, numbers[rule.name])
        if self.rule.name in numbers:
            value = numbers[self.rule.name]
            if step != self._step or self.rule.better(value, self._value):
                self._value = value
            self._unsaved = self.rule.better(self._value, self._history.get(f"saved_{self.rule.name}"))
            self._step, self._new = step, self._keeps

    def _raise(self, which: str, rule: Rule, value: float) -> None:
        if rule.better(value, self._history.get(f"{which}_{rule.name}")):
            self._history[f"{which}_{rule.name}"] = value

    @property
    def best(self) -> float | None:
        """The best score of the run so far; None: no score was recorded."""
        return self._history.get(f"best_{self.rule.name}")

    def asks(self, step: int) -> bool | None:
        """Returns whether to save the state after `step` for its score. None: no score came since the last call."""
        new, self._new = self._new, False
        return self._unsaved and self._step == step if new else None

    def of(self, step: int) -> float | None:
        """Returns the score of the weights after `step`; None: they were not measured."""
        return self._value if step == self._step and math.isfinite(self._value) else None

    def saved(self, step: int) -> None:
        """Records that a checkpoint of the state after `step` is about to be gathered."""
        if step == self._step:
            self._raise("saved", self.rule, self._value)
            self._unsaved = False


class Saver:
    """Decides when a checkpoint is due, gathers it, and counts failed saves.

    Args:
        alive: called while this rank waits for a bucket, which may take long.
    """

    def __init__(self, run: Run, alive: Callable[[], None]) -> None:
        self._alive = alive
        self.leaving_since = math.inf
        """When the ranks agreed to leave (`time.monotonic`), for the grace period of later waits; infinite: they have not."""
        settings = run.config.checkpoint
        self.run, self.settings, self._grace = run, settings, run.config.preempt.grace_seconds
        self.failures = 0
        self._writer: Writer | None = None
        self._taken_over = ""
        """The message of the error that found another attempt writing to the bucket; "": none was found."""
        self._lost = False
        """Whether the disk lacks what a lost rank was to save, so that a save is due."""
        self._future: Future[SaveResult] | None = None
        self._sender: Sender | None = None
        self._sends: list[Future[list[SaveResult]]] = []
        """Sends that are not reported yet, in order."""
        self._unsent = False
        """Whether the last send has failed."""
        self.last_step = run.user_state.steps
        """The step of the newest checkpoint that this run saved or resumed from."""
        self._last_time = time.monotonic()
        self.interval = Interval(run.state.history["failures"])
        self._last_failed = self._hangs = False
        self.scores = Scores(run.state.history, settings.keep_best)
        self._begin_writing()

    def _begin_writing(self) -> None:
        if (directory := self.run.directory) is not None:
            self._writer = Writer(directory.checkpoints, self.settings.keep, self.settings.keep_best)
            if (objects := self.run.objects) is not None:
                self._sender = Sender(objects, directory.checkpoints)
                # An earlier attempt, or a lost rank, may have left checkpoints unsent.
                self._sends = [self._sender.send(self.last_step)]
                directory.at_close.append(self._finish)

    def take_over(self) -> None:
        """Makes this rank write, in place of a lost rank 0. A save is due if the disk lacks the last one."""
        self._begin_writing()
        assert self.run.directory is not None
        with contextlib.suppress(OSError):
            store.clean(self.run.directory.checkpoints)
        newest = store.candidates(self.run.directory.checkpoints)[:1]
        self._lost = not newest or store.step_of(newest[0]) < self.last_step

    def due_by_step(self) -> bool:
        """Returns whether the step count asks for a save at this boundary. The same on every rank."""
        interval, steps = self.settings.every_steps, self.run.user_state.steps
        return bool(interval) and steps % interval == 0 and steps > self.last_step

    @property
    def steps_since(self) -> int:
        """Steps since the last save, or since the start. The same on every rank."""
        return self.run.user_state.steps - self.last_step

    def due_by_time(self) -> bool:
        """Returns whether this rank's clock asks for a save. The ranks then agree."""
        interval = self.settings.every_seconds
        if self._lost:
            return True
        if interval == "auto":
            interval = self.interval.seconds(self.run.state.clock.trained)
        return bool(interval) and self.run.world.leader and time.monotonic() - self._last_time >= interval

    def save(self) -> None:
        """Gathers the state and passes it to the writer's thread, with the score of these weights, if there is one. Collective."""
        step = self.run.user_state.steps
        self.scores.saved(step)
        self.run.state.clock.settle()
        began = time.perf_counter()
        self._reap()
        self._check_taken_over()
        gathered = gather(self.run.state)
        self.last_step, self._last_time = step, time.monotonic()
        self._lost = False
        # While a save hangs, another one would wait for it.
        if self._writer is not None and gathered is not None and not self._hangs:
            self._future = self._writer.save(step, gathered, self.scores.of(step))
            if self._sender is not None:
                self._sends.append(self._sender.send(step, self._future))
            stalled = time.perf_counter() - began
            self.interval.stalled(stalled)
            self.run.event("checkpoint", step=step, stall_seconds=round(stalled, 6))

    def look(self) -> None:
        """Records the result of a save that has ended. Does not wait."""
        if self._future is not None and self._future.done():
            self._reap()
        self._tell_sent()

    def _check_taken_over(self) -> None:
        """Raises `UserError` on all ranks if another attempt writes to the bucket. Collective."""
        if self.settings.to is not None:
            with failing_together(self.run.world):
                if self._taken_over:
                    raise UserError(f"{self._taken_over}: this one ends")

    def durable(self) -> bool:
        """Waits for the last save. Returns whether the run directory has it, and the bucket if there is one; True if none was made.
        Collective."""
        world = self.run.world
        self._reap()
        while True:
            generation = world.generation
            while world.live is not None and any_rank(self._lost, world):
                self.save()
                self._reap()
            # An upload may take longer than a collective, so the others wait in many of them.
            while self.settings.to is not None and any_rank(self._waits_for_bucket(), world):
                self._alive()
            self._check_taken_over()
            failed = any_rank(self._last_failed or self._unsent, world)
            if generation == world.generation:  # else another rank writes by now, and has waited for nothing yet
                return not failed

    def _waits_for_bucket(self) -> bool:
        """Waits a moment. Returns whether a send is still under way."""
        if self._sends:
            wait(self._sends, max(0.0, min(BUCKET_LOOK_SECONDS, self._left())))
            self._tell_sent()
        if self._sends and self._left() <= SAVE_LOOK_SECONDS:
            self._sends.clear()
            self._not_sent(f"the bucket did not answer within the grace period of {self._grace:g} s", "timeout")
        return bool(self._sends)

    def _tell_sent(self) -> None:
        """Records the results of the uploads that have ended."""
        while self._sends and self._sends[0].done():
            try:
                results = self._sends.pop(0).result()
            except OSError as error:
                if isinstance(error, TakenOver):
                    self._taken_over = str(error)
                self._not_sent(str(error), "bucket")
            else:
                self._unsent = False
                for result in results:
                    self._stands("checkpoint_sent", result)

    def _not_sent(self, why: str, reason: str) -> None:
        self._unsent = True
        self._count_failure(why, reason)
        self.run.console.warn(f"a checkpoint is not in the bucket, only on this node's disk: {why}")

    def _count_failure(self, why: str, reason: str) -> None:
        self.run.metrics.count("checkpoint_failures_total", reason)
        self.failures += 1
        self.run.event("checkpoint_failed", reason=why, failures=self.failures)

    def _left(self) -> float:
        """Returns the seconds of the grace period that are left for a disk or a bucket; infinite if no rank has been asked to leave."""
        signalled = math.inf if self.run.signals is None else self.run.signals.since
        return min(signalled, self.leaving_since) + self._grace - time.monotonic()

    def _reap(self) -> None:
        """Waits for the last save, after a signal at most for the rest of the grace period. Records its result. If the disk fails, this
        checkpoint is lost, and the run continues."""
        if (future := self._future) is None:
            return
        left = math.inf
        while left > SAVE_LOOK_SECONDS and not future.done():
            left = self._left()
            wait([future], max(0.0, min(left, SAVE_LOOK_SECONDS)))
        self._hangs = not future.done()
        error: BaseException | str | None = f"the disk did not answer within the grace period of {self._grace:g} s"
        if not self._hangs:
            error = future.exception()
        if isinstance(error, BaseException) and not isinstance(error, OSError):
            raise error
        self._last_failed, self._future = error is not None, None
        if error is None:
            self._stands("checkpoint_written", future.result())
        else:
            self._count_failure(str(error), "timeout" if self._hangs else "disk")
            self.run.console.warn(f"a checkpoint could not be saved, the run continues: {error}")

    def _stands(self, event: str, result: SaveResult) -> None:
        """Reports a checkpoint that is on the disk, or in the bucket."""
        self.run.event(event, path=result.path.name, seconds=round(result.seconds, 4), bytes=result.bytes)
        if event == "checkpoint_sent" or self._sender is None:  # where it outlives this node
            self.run.metrics.checkpoint_written(result.seconds)
            self.interval.written(result.seconds)

    def _finish(self) -> None:
        """Commits the files of the attempt's end to the bucket. A bucket that does not answer does not block the end of the process."""
        assert self.run.objects is not None
        seconds = max(0.0, min(LAST_COMMIT_SECONDS, self._left()))
        future = _SENDING.run(self.run.objects.commit, None)
        wait([future], seconds)
        error = future.exception() if future.done() else f"the bucket did not answer within {seconds:.0f} s"
        if error is not None:
            to_stderr(f"warning: {self.run.path}: the end of this attempt is not in the bucket: {error}")

    def close(self) -> None:
        """Waits for the last save, unless it hangs. Then its temporary file stays, and the next start removes it."""
        self._reap()
        while not self._hangs and self._waits_for_bucket():
            pass
