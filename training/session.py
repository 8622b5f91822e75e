"""What surrounds the steps of a run: the boundary at which all ranks leave or save together, checkpoints, metrics, the end.

    with Session(prepared, signals, began) as session:
        for batch in session.batches():         # of the epoch under way; raises `Ended` where the ranks agreed to leave
            …                                   # a step
            session.step_done(batch, lr, grad_norm)
        session.epoch_done()                    # evaluates, and saves
        session.finish()

All ranks call the same methods in the same order.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist

from training import contract
from training.checkpoint.saver import Saver
from training.checkpoint.state import averaged_buffers
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from training.data.loader import Batch
from training.evaluate.evaluator import Evaluator, Score
from training.observe.clock import Times
from training.observe.reading import Reading
from training.observe.watch import watchers
from training.parallel.exchange import failing_together
from training.resilience import divergence
from training.resilience.closeness import ReplicasDiffer
from training.resilience.hang import Heartbeat
from training.resilience.preempt import Consensus, Decision, Signals
from training.run.prepare import Prepared
from training.run.summary import summarise


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: the exit code and a sentence."""

    code: int
    reason: str


class Ended(Exception):
    """The run ends here, on all ranks."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.ending = Ending(code, reason)


class Session:
    """One attempt, from the cursor to the end. Every method is called by all ranks, in the same order.

    Args:
        signals: what the process receives; None where the calling script handles signals itself.
        began: `time.perf_counter()` at the start of the process.
    """

    def __init__(self, prepared: Prepared, signals: Signals | None, began: float) -> None:
        self.prepared, self.began = prepared, began
        self.config, self.world, self.state = prepared.config, prepared.world, prepared.state
        self.loader, self.metrics, self.console = prepared.loader, prepared.metrics, prepared.console
        self.times: Times = {}
        self.nonfinite_steps = 0
        """Steps in a row whose gradient was not finite."""
        stop_file = None if prepared.run is None else prepared.run.path / contract.STOP_FILE
        self.consensus = Consensus(self.world, signals, stop_file)
        self.heartbeat = Heartbeat(self.world)
        self.saver = Saver(prepared, lambda: signals.since if signals is not None else None)
        self.reading = Reading(self.state.losses, self.world)
        with failing_together(self.world):
            self.evaluator = Evaluator(self.config, self.world, prepared.manifest)
        self.watchers = watchers(prepared, self.evaluate)

    def __enter__(self) -> Session:
        prepared = self.prepared
        prepared.exporter.begin()
        prepared.event(
            "start", world_size=self.world.size, step=prepared.steps_done, config_hash=self.config.hash()
        )  # fmt: skip
        preprocessing = time.perf_counter() - self.began
        prepared.event("prepared", seconds=preprocessing)
        self.console.line(f"Preprocessing: {preprocessing:.2f} seconds")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        try:
            if error is None or isinstance(error, Ended):  # all ranks are here: after another error one may be missing
                self._tell_readings(wait=True)
                self.consensus.settle()
            else:
                with contextlib.suppress(RuntimeError):  # the first error counts
                    self.consensus.settle()
        finally:
            self.saver.close()  # whatever happened, the save under way is finished

    def batches(self) -> Iterator[Batch]:
        """This rank's part of each global batch, from the cursor to the end of the epoch.

        Before each one the ranks leave, or save, where they agreed to. Raises `Ended`.
        """
        cursor, clock = self.state.cursor, self.state.clock
        batches = self.loader.epoch(cursor.epoch, cursor.step)
        try:
            while cursor.step < self.loader.steps_per_epoch:
                decision = self._boundary(self.saver.due_by_time())
                if decision.stop:
                    self._leave()
                if self.saver.due_by_step() or (decision.save and self.saver.steps_since > 1):
                    self.save()
                clock.begin()
                batch = next(batches)
                clock.data_ready()
                yield batch
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def skip_step(self, reason: str) -> None:
        """A step has moved no weight, because its gradient was not finite. Raises `Ended` where the run is not to go on."""
        self.metrics.nonfinite()
        self.prepared.event("nonfinite", step=self.prepared.steps_done + 1, reason=reason)
        if self.config.nonfinite == "stop":
            raise Ended(EXIT_FAILED, f"the run diverged at {reason}; no weight was changed by that step")
        self.console.warn(f"left out {reason}")
        self.nonfinite_steps += 1
        if self.nonfinite_steps > self.config.nonfinite_limit:
            raise Ended(
                EXIT_FAILED,
                f"{self.nonfinite_steps} steps in a row were left out (nonfinite_limit), the last one at {reason}",
            )

    def step_done(self, batch: Batch, lr: float, grad_norm: torch.Tensor | None) -> None:
        """Moves the cursor, and tells of the step. Waits for nothing. Raises `Ended` where replicas differ."""
        state, prepared = self.state, self.prepared
        state.cursor.step += 1
        state.clock.end()
        done = prepared.steps_done
        self.heartbeat.beat(done)
        self.console.step(state.cursor.epoch, done)
        measured = state.clock.measured()
        if measured:
            self.times = measured[-1]
        if self.config.metrics.enabled:
            samples = len(batch.rows) if batch.weight else 0
            self.metrics.step(measured, done, lr, samples, state.sync.bytes_sent)
        if done % self.config.log.every == 0:
            self.reading.take(state.losses, grad_norm, step=done, lr=lr)
        self._tell_readings()
        try:
            for watch in self.watchers:
                watch()
        except ReplicasDiffer as error:
            raise Ended(EXIT_FAILED, f"the replicas are not the same after step {done}: {error}") from error

    def _tell_readings(self, wait: bool = False) -> None:
        """Events `step` of the readings that have arrived; with `wait`, of all. All ranks wait alike, or none."""
        for values in self.reading.ready(wait):
            if values["train_loss"] is not None:
                self.metrics.reading(values["train_loss"], values["grad_norm"])
            times = {name: round(value, 6) for name, value in self.times.items()}
            self.prepared.event("step", **values, **times)

    def _boundary(self, save_due: bool = False) -> Decision:
        self.metrics.alive()
        return self.consensus.poll(save_due)

    def evaluate(self, leave: Callable[[], bool] = lambda: False) -> Score | None:
        """The score of the weights that evaluation uses; None where `leave` said so. Collective."""
        model = self.state.sync.full_module(self.state.ema.average if self.state.ema else self.state.model)
        return self.evaluator.score(model, averaged_buffers(model, self.world), leave)

    def epoch_done(self) -> None:
        """Evaluates and saves where it is time to, and moves the cursor to the next epoch. Raises `Ended`."""
        state, prepared, config = self.state, self.prepared, self.config
        state.clock.settle()
        self._tell_readings(wait=True)
        epoch = state.cursor.epoch + 1
        last = epoch >= config.epochs
        score: Score | None = None
        if last or epoch % config.evaluate.every == 0:
            score = self.evaluate(lambda: self._boundary().stop)
            if score is None:
                self._leave()
        losses = state.losses.cpu().clone()
        dist.all_reduce(losses)
        step = prepared.steps_done
        state.losses.zero_()
        self.reading.new_epoch()
        state.cursor.epoch, state.cursor.step = epoch, 0
        values = {
            "epoch": epoch, "step": step, "trained_seconds": round(state.clock.trained, 4),
            "train_loss": float(losses[0] / losses[1].clamp_min(1)), "accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None, "examples_seen": prepared.samples_done,
            "images_per_second": prepared.samples_done / max(state.clock.trained, 1e-9),
        }  # fmt: skip
        state.history.update(train_loss=values["train_loss"])
        best = self._note_score(score)
        prepared.event("epoch", **values)
        every_epoch = config.checkpoint.every_steps == 0
        if last or every_epoch or self.saver.due_by_step() or (config.checkpoint.keep_best and best):
            self.save(score.accuracy if score else None)

    def _note_score(self, score: Score | None) -> bool:
        """Keeps the score in the run's history; whether it is the best so far."""
        if score is None:
            return False
        history = self.state.history
        self.metrics.accuracy(score.accuracy)
        history.update(
            accuracy=score.accuracy, test_loss=score.loss,
            class_accuracy=score.by_class(self.prepared.manifest.classes),
        )  # fmt: skip
        best = score.accuracy > history.get("best_accuracy", -1.0)
        if best:
            history["best_accuracy"] = score.accuracy
        return best

    def save(self, accuracy: float | None = None) -> None:
        """Saves. Raises `Ended` instead where weights are lost, so that the newest checkpoint is a good one."""
        if self.config.nonfinite != "ignore" and not divergence.finite_everywhere(self.state.model):
            step = self.prepared.steps_done
            raise Ended(
                EXIT_FAILED, f"a weight is NaN or infinite after step {step}: not saved; the last checkpoint is good"
            )
        self.saver.save(accuracy)

    def _leave(self) -> None:
        """The ranks have agreed to end early: saves, and raises `Ended`."""
        self.saver.leaving()
        self.consensus.settle()
        self._tell_readings(wait=True)
        prepared, state = self.prepared, self.state
        state.clock.settle()
        self.metrics.preempted()
        state.history["preemptions"] = state.history.get("preemptions", 0) + 1
        if self.config.checkpoint.on_signal:
            self.save()
        saved, step = self.saver.durable(), prepared.steps_done
        who = self.consensus.reason or "another rank"
        prepared.event("preempted", step=step, reason=who, saved=saved)
        if not saved:
            raise Ended(EXIT_FAILED, f"ended early by {who} at step {step}, and could not save (see the warnings)")
        if prepared.run is not None:
            (prepared.run.path / contract.STOP_FILE).unlink(missing_ok=True)  # it must not stop the next start, too
        raise Ended(EXIT_PREEMPTED, f"ended early by {who} at step {step}: run the same command again to go on")

    def finish(self) -> Ending:
        """The end of a run that was trained to its last step: the last save, the summary, and how it went."""
        prepared, history = self.prepared, self.state.history
        saved = self.saver.durable()
        accuracy = history.get("accuracy")
        summarise(prepared, time.perf_counter() - self.began, self.saver.failures)
        if accuracy is not None:
            self.console.line(f"Final validation accuracy: {accuracy:.4f}")
        if self.config.evaluate.per_class:
            self.console.per_class(history.get("class_accuracy", {}))
        if not saved:
            return Ending(
                EXIT_FAILED, "trained to the end, but the last checkpoint could not be saved (see the warnings)"
            )
        loss, classes = history.get("train_loss"), len(prepared.manifest.classes)
        if loss is not None and loss > 2 * math.log(max(classes, 2)):
            self.console.line(
                f"The loss at the end is {loss:.4g}; guessing among {classes} classes has {math.log(classes):.2f}. "
                "The run has not learned: try a smaller lr."
            )
            return Ending(EXIT_DONE, f"complete, but its loss of {loss:.4g} is far above that of guessing")
        return Ending(EXIT_DONE, "complete")
