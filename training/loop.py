"""The training loop.

    for each epoch, for each global batch:  lr ← schedule;  step;  average the weights;  leave or save where agreed
    after each epoch:                       evaluate;  save

`train` runs one attempt of a run, from where its directory says it stands, and returns the exit code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from training import contract, divergence
from training.capture import capture_stream
from training.clock import Times
from training.closeness import ReplicasDiffer
from training.config import Config
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UserError
from training.data.loader import Batch
from training.evaluate import Evaluator, Score
from training.hang import Heartbeat, is_collective, last_words
from training.optim import learning_rate
from training.preempt import Consensus, Decision, Signals
from training.reading import Reading
from training.saving import Saver
from training.setup import Prepared, note_corrupt_shard, prepare, together
from training.state import averaged_buffers
from training.step import NonFinite
from training.watch import watchers
from training.world import World


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended: the exit code and a sentence."""

    code: int
    reason: str


def train(
    config: Config, world: World, run_dir: Path, fresh: bool | str = False, signals: Signals | None = None,
    began: float | None = None,
) -> int:  # fmt: skip
    """Trains, or resumes, a run. Every rank of a joined world calls it.

    Args:
        signals: what the process receives; None where the calling script handles signals itself.
        began: `time.perf_counter()` at the start of the process, for the preprocessing time.

    Returns:
        0 done, 75 saved and to be run again, 1 diverged or not saved.

    Raises:
        UserError: the config, the data or the run directory cannot be used.
    """
    began = time.perf_counter() if began is None else began
    with capture_stream(config, world.device):
        return _train(config, world, run_dir, fresh, signals, began)


def _train(
    config: Config, world: World, run_dir: Path, fresh: bool | str, signals: Signals | None, began: float
) -> int:
    prepared = prepare(config, world, run_dir, fresh)
    run = prepared.run
    if signals is not None:
        signals.last_words = prepared.exporter.close
    try:
        if prepared.complete:
            _say_complete(prepared)
            if run is not None and world.leader and not (run.path / contract.SUMMARY_FILE).exists():
                _summarise(prepared, time.perf_counter() - began, 0)  # killed after the last save, before the summary
            ending = Ending(EXIT_DONE, "complete")
        else:
            ending = _Loop(prepared, signals, began).run()
        if signals is not None:
            signals.ignore()
        if run is not None:
            run.status(ending.code, ending.reason, prepared.steps_done)
        prepared.exporter.close(ending.code)
        prepared.console.close()
        if ending.code != EXIT_DONE and world.leader:
            prepared.console.warn(ending.reason)
        _leave_together(world, lambda: _report(prepared))
        return ending.code
    except BaseException as error:
        prepared.console.close()
        note_corrupt_shard(prepared.metrics, error)
        prepared.exporter.close(EXIT_USAGE if isinstance(error, UserError) else EXIT_FAILED)
        if world.size > 1 and is_collective(error):
            reason = last_words(world, prepared.steps_done, error)
            if run is not None:
                run.status(EXIT_FAILED, reason, prepared.steps_done)
            prepared.console.warn(reason)
            return EXIT_FAILED  # the sentence says more than gloo's traceback would
        if run is not None and isinstance(error, UserError):
            run.status(EXIT_USAGE, str(error), prepared.steps_done)
        elif run is not None:
            run.status(EXIT_FAILED, f"{type(error).__name__}: {error}", prepared.steps_done)
        raise
    finally:
        if run is not None:
            run.close()


class _Loop:
    """One attempt, from the cursor to the end."""

    def __init__(self, prepared: Prepared, signals: Signals | None, began: float) -> None:
        self.p, self.began = prepared, began
        self.config, self.world, self.state = prepared.config, prepared.world, prepared.state
        self.times: Times = {}
        self.left_out = 0
        """Steps in a row whose gradient was not finite."""
        stop_file = None if prepared.run is None else prepared.run.path / contract.STOP_FILE
        self.consensus = Consensus(self.world, signals, stop_file)
        self.heartbeat = Heartbeat(self.world)
        self.saver = Saver(prepared, lambda: signals.since if signals is not None else None)
        self.reading = Reading(self.state.losses)
        with together(self.world):
            self.evaluator = Evaluator(self.config, self.world, prepared.manifest)
        self.watchers = watchers(prepared, self._score)

    def run(self) -> Ending:
        p, cursor = self.p, self.state.cursor
        p.exporter.begin()
        p.event("start", world_size=self.world.size, step=p.steps_done, config_hash=self.config.hash())
        preprocessing = time.perf_counter() - self.began
        p.event("prepared", seconds=preprocessing)
        p.console.line(f"Preprocessing: {preprocessing:.2f} seconds")
        try:
            while cursor.epoch < self.config.epochs:
                ending = self._epoch()
                if ending is not None:
                    return ending
            return self._finish()
        except ReplicasDiffer as error:
            return Ending(EXIT_FAILED, f"the replicas are not the same after step {p.steps_done}: {error}")
        finally:
            try:
                self.consensus.settle()
            finally:
                self.saver.close()  # whatever happened, the save under way is finished

    def _epoch(self) -> Ending | None:
        cursor, clock, p = self.state.cursor, self.state.clock, self.p
        batches = p.loader.epoch(cursor.epoch, cursor.step)
        while cursor.step < p.loader.steps_per_epoch:
            decision = self._boundary(self.saver.due_by_time())
            if decision.stop:
                batches.close() if hasattr(batches, "close") else None
                return self._preempted()
            due = self.saver.due_by_step() or (decision.save and self.saver.steps_since > 1)
            if due and (lost := self._save()):
                return lost
            clock.begin()
            batch = next(batches)
            clock.data_ready()
            when = self._when()
            try:
                p.step(batch, cursor.epoch, when)
            except NonFinite:
                reason = f"step {p.steps_done + 1}: {divergence.diagnose(p.step, batch, cursor.epoch)}"
                p.metrics.nonfinite()
                p.event("nonfinite", step=p.steps_done + 1, reason=reason)
                if self.config.nonfinite == "stop":
                    return Ending(EXIT_FAILED, f"the run diverged at {reason}; no weight was changed by that step")
                p.console.warn(f"left out {reason}")
                self.left_out += 1
                if self.left_out > self.config.nonfinite_limit:
                    return Ending(
                        EXIT_FAILED,
                        f"{self.left_out} steps in a row were left out (nonfinite_limit), the last one at {reason}",
                    )
            else:
                self.left_out = 0
            cursor.step += 1
            if self.state.ema:
                self.state.ema.update(p.steps_done)
            clock.end()
            self.heartbeat.beat(p.steps_done)
            p.console.step(cursor.epoch, p.steps_done)
            self._measure(batch, learning_rate(self.config.optim, when))
            for watch in self.watchers:
                watch()
        return self._end_of_epoch()

    def _boundary(self, save_due: bool = False) -> Decision:
        self.p.metrics.alive()
        return self.consensus.poll(save_due)

    def _measure(self, batch: Batch, lr: float) -> None:
        """Hands the step to the metrics, and reads the loss now and then. Waits for nothing."""
        p, measured = self.p, self.state.clock.measured()
        if measured:
            self.times = measured[-1]
        if self.config.metrics.enabled:
            samples = len(batch.rows) if batch.weight else 0
            p.metrics.step(measured, p.steps_done, lr, samples, self.state.sync.bytes_sent)
        if p.steps_done % self.config.log.every == 0:
            self.reading.take(self.state.losses, p.step.grad_norm, step=p.steps_done, lr=lr)
        for values in self.reading.ready():
            if values["train_loss"] is not None:
                p.metrics.reading(values["train_loss"], values["grad_norm"])
            p.event("step", **values, **{name: round(value, 6) for name, value in self.times.items()})

    def _when(self) -> float:
        """Where the schedule stands after the next step."""
        step = self.p.steps_done + 1
        return step / self.p.loader.steps_per_epoch if self.config.optim.schedule_unit == "epoch" else step

    def _score(self, leave: Callable[[], bool] = lambda: False) -> Score | None:
        """The score of the weights that evaluation uses; None where `leave` said so. Collective."""
        model = self.state.sync.whole(self.state.ema.average if self.state.ema else self.state.model)
        return self.evaluator.score(model, averaged_buffers(model, self.world), leave)

    def _end_of_epoch(self) -> Ending | None:
        state, p = self.state, self.p
        state.clock.settle()
        epoch, last = state.cursor.epoch + 1, state.cursor.epoch + 1 >= self.config.epochs
        score: Score | None = None
        if last or epoch % self.config.evaluate.every == 0:
            score = self._score(lambda: self._boundary().stop)
            if score is None:
                return self._preempted()
        losses = state.losses.cpu().clone()
        dist.all_reduce(losses)
        steps = p.steps_done
        state.losses.zero_()
        self.reading.new_epoch()
        state.cursor.epoch, state.cursor.step = epoch, 0
        values = {
            "epoch": epoch, "step": steps, "trained_seconds": round(state.clock.trained, 4),
            "train_loss": float(losses[0] / losses[1].clamp_min(1)), "accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None, "examples_seen": p.samples_done,
            "images_per_second": p.samples_done / max(state.clock.trained, 1e-9),
        }  # fmt: skip
        state.history.update(train_loss=values["train_loss"])
        best = score is not None and score.accuracy > state.history.get("best_accuracy", -1.0)
        if score:
            p.metrics.accuracy(score.accuracy)
            state.history.update(
                accuracy=score.accuracy, test_loss=score.loss, class_accuracy=score.by_class(p.manifest.classes)
            )
        if score and best:
            state.history["best_accuracy"] = score.accuracy
        p.event("epoch", **values)
        settings = self.config.checkpoint
        if last or settings.every_steps == 0 or self.saver.due_by_step() or (settings.keep_best and best):
            return self._save(score.accuracy if score else None)
        return None

    def _save(self, accuracy: float | None = None) -> Ending | None:
        """Saves; weights that are lost end the run instead, so that the newest checkpoint is a good one. Collective."""
        if self.config.nonfinite != "ignore" and not divergence.finite_everywhere(self.state.model):
            return Ending(
                EXIT_FAILED,
                f"a weight is NaN or infinite after step {self.p.steps_done}: not saved; the last checkpoint is good",
            )
        self.saver.save(accuracy)
        return None

    def _preempted(self) -> Ending:
        self.saver.leaving()
        self.consensus.settle()
        p, state = self.p, self.state
        state.clock.settle()
        p.metrics.preempted()
        state.history["preemptions"] = state.history.get("preemptions", 0) + 1
        if self.config.checkpoint.on_signal and (lost := self._save()):
            return lost
        saved = self.saver.durable()
        who = self.consensus.reason or "another rank"
        p.event("preempted", step=p.steps_done, reason=who, saved=saved)
        if not saved:
            return Ending(
                EXIT_FAILED, f"ended early by {who} at step {p.steps_done}, and could not save (see the warnings)"
            )
        if p.run is not None:
            (p.run.path / contract.STOP_FILE).unlink(missing_ok=True)  # obeyed; it must not stop the next start
        return Ending(
            EXIT_PREEMPTED, f"ended early by {who} at step {p.steps_done}: run the same command again to go on"
        )

    def _finish(self) -> Ending:
        p, history = self.p, self.state.history
        saved = self.saver.durable()
        accuracy = history.get("accuracy")
        _summarise(p, time.perf_counter() - self.began, self.saver.failures)
        if accuracy is not None:
            p.console.line(f"Final validation accuracy: {accuracy:.4f}")
        if self.config.evaluate.per_class:
            p.console.per_class(history.get("class_accuracy", {}))
        if not saved:
            return Ending(
                EXIT_FAILED, "trained to the end, but the last checkpoint could not be saved (see the warnings)"
            )
        loss, classes = history.get("train_loss"), len(p.manifest.classes)
        if loss is not None and loss > 2 * math.log(max(classes, 2)):
            p.console.line(
                f"The loss at the end is {loss:.4g}; guessing among {classes} classes has {math.log(classes):.2f}. "
                "The run has not learned: try a smaller lr."
            )
            return Ending(EXIT_DONE, f"complete, but its loss of {loss:.4g} is far above that of guessing")
        return Ending(EXIT_DONE, "complete")


def _summarise(p: Prepared, wall_seconds: float, failures: int) -> None:
    """Writes summary.json and the last event of a run that is complete."""
    state, config = p.state, p.config
    history, trained = state.history, max(state.clock.trained, 1e-9)
    summary = {
        "recipe": config.recipe, "sync": config.sync.name, "world_size": p.world.size, "steps": p.steps_done,
        "epochs": state.cursor.epoch, "train_loss": history.get("train_loss"), "test_loss": history.get("test_loss"),
        "accuracy": history.get("accuracy"), "class_accuracy": history.get("class_accuracy"), "best_accuracy": history.get("best_accuracy"),
        "images_per_second": p.samples_done / trained, "examples_seen": p.samples_done, "trained_seconds": trained,
        "wall_seconds": wall_seconds, "global_batch_size": p.global_batch, "restarts": p.attempt - 1,
        "preemptions": history.get("preemptions", 0), "checkpoint_failures": failures, "config_hash": config.hash(),
        "data": p.data,
    }  # fmt: skip
    if p.run is not None and p.world.leader:
        p.run.summary(summary)
    p.event("done", **summary)


def _say_complete(prepared: Prepared) -> None:
    accuracy = prepared.state.history.get("accuracy")
    told = f", validation accuracy {accuracy:.4f}" if accuracy is not None else ""
    prepared.console.line(
        f"The run is complete: {prepared.config.epochs} epochs, {prepared.steps_done} steps{told}. "
        "Raise epochs to go on, or start over with --fresh (FRESH=1 make train)."
    )


def _report(p: Prepared) -> None:
    """Rank 0 writes report.html, when the others have written what goes into it. It never costs the run its ending."""
    if p.run is None or not p.world.leader or not p.config.log.report:
        return
    try:
        from training import report

        report.write([p.run.path], p.run.path / contract.REPORT_FILE)
    except Exception as error:  # noqa: BLE001
        p.console.warn(f"no {contract.REPORT_FILE}: {error}")


def _leave_together(world: World, last: Callable[[], None]) -> None:
    """No rank is gone while another still works: the first one out makes launchers end the others.

    Args:
        last: what is done when every rank has written its files.
    """
    if world.size > 1:
        dist.barrier()
    last()
    if world.size > 1:
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.synchronize()
