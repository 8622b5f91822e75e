"""What surrounds the steps of a recipe's run: its batches between the boundaries, evaluation and the end of each epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from lockstep.training.checkpoint.state import averaged_buffers
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED
from lockstep.training.data.loader import Batch
from lockstep.training.evaluate.evaluator import Evaluator, Score
from lockstep.training.evaluate.periodic import PeriodicScore
from lockstep.training.parallel.exchange import failing_together
from lockstep.training.resilience.preempt import Signals
from lockstep.training.run.attempt import Attempt, Ending
from lockstep.training.run.prepare import Prepared
from lockstep.training.run.summary import summarise


class RecipeAttempt(Attempt):
    """An attempt at a recipe's run: epochs over its data, each with its evaluation.

    Args:
        signals: what the process receives; None where the calling script handles signals itself.
        began: `time.perf_counter()` at the start of the process.
    """

    context: Prepared

    def __init__(self, prepared: Prepared, signals: Signals | None, began: float) -> None:
        super().__init__(prepared, signals, began)
        self.config = prepared.config
        with failing_together(prepared.world):
            self.evaluator = Evaluator(self.config, prepared.world, prepared.manifest, verified=True)
        self.periodic_score = (
            PeriodicScore(prepared, self.evaluate, self.note_score) if self.config.log.score_every else None
        )

    def __enter__(self) -> RecipeAttempt:
        super().__enter__()
        return self

    def batches(self) -> Iterator[Batch]:
        """This rank's part of each global batch, from the cursor to the end of the epoch.

        Before each one the ranks leave, or save, where they agreed to. Raises `Ended`.
        """
        loader, cursor, clock = self.context.loader, self.context.state.cursor, self.context.state.clock
        batches = loader.epoch(cursor.epoch, cursor.step)
        try:
            while cursor.step < loader.steps_per_epoch:
                self.boundary()
                clock.begin()
                batch = next(batches)
                clock.data_ready()
                yield batch
        finally:
            if hasattr(batches, "close"):
                batches.close()

    def batch_done(self, batch: Batch, lr: float, grad_norm: torch.Tensor | None) -> None:
        """Moves the cursor, and reports the step. Raises `Ended` where replicas differ."""
        self.context.state.cursor.step += 1
        self.step_done(lr, len(batch.rows) if batch.weight else 0, grad_norm)
        if self.periodic_score is not None:
            self.periodic_score()

    def evaluate(self, leave: Callable[[], bool] = lambda: False) -> Score | None:
        """The score of the weights that evaluation uses; None where `leave` said so. Collective."""
        state = self.context.state
        model = state.sync.full_module(state.ema.average if state.ema else state.model)
        return self.evaluator.score(model, averaged_buffers(model, self.context.world), leave)

    def epoch_done(self) -> None:
        """Evaluates and saves where it is time to, and moves the cursor to the next epoch. Raises `Ended`."""
        prepared, state, config = self.context, self.context.state, self.config
        state.clock.settle()
        self.tell_readings(wait=True)
        epoch = state.cursor.epoch + 1
        last = epoch >= config.epochs
        score: Score | None = None
        if last or epoch % config.evaluate.every == 0:
            score = self.evaluate(lambda: self.poll().stop)
            if score is None:
                self.leave()
        step = prepared.steps_done
        loss = self.epoch_loss()
        state.cursor.epoch, state.cursor.step = epoch, 0
        values = {
            "epoch": epoch, "step": step, "trained_seconds": round(state.clock.trained, 4),
            "train_loss": loss, "accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None, "examples_seen": prepared.samples_done,
            "images_per_second": prepared.samples_done / max(state.clock.trained, 1e-9),
        }  # fmt: skip
        state.history.update(train_loss=values["train_loss"])
        self.note_score(score)
        prepared.event("epoch", **values)
        every_epoch = config.checkpoint.every_steps == 0
        unscored = score is not None and self.saver.last_step == step  # an earlier start left during this evaluation
        if self.context.scores.asks(step) or last or every_epoch or unscored or self.saver.due_by_step():
            self.save()

    def note_score(self, score: Score | None) -> None:
        """Keeps the score of these weights in the run's history."""
        if score is None:
            return
        self.context.metrics.accuracy(score.accuracy)
        self.context.state.history.update(
            accuracy=score.accuracy, test_loss=score.loss,
            class_accuracy=score.by_class(self.context.manifest.classes),
        )  # fmt: skip
        self.context.scores.note({"accuracy": score.accuracy, "test_loss": score.loss}, self.context.steps_done)

    def finish(self) -> Ending:
        """The end of a run that was trained to its last step: the last save, the summary, and how it went."""
        prepared, console, history = self.context, self.context.console, self.context.state.history
        saved = self.saver.durable()
        accuracy = history.get("accuracy")
        summarise(prepared, time.perf_counter() - self.began, self.saver.failures)
        if accuracy is not None:
            console.line(f"Final validation accuracy: {accuracy:.4f}")
        if self.config.evaluate.per_class:
            console.per_class(history.get("class_accuracy", {}))
        if not saved:
            return Ending(
                EXIT_FAILED, "training finished, but the last checkpoint could not be saved (see the warnings)"
            )
        loss, classes = history.get("train_loss"), len(prepared.manifest.classes)
        if loss is not None and loss > 2 * math.log(max(classes, 2)):
            console.line(
                f"The loss at the end is {loss:.4g}; guessing among {classes} classes has {math.log(classes):.2f}. "
                "The run has not learned: try a smaller lr."
            )
            return Ending(EXIT_DONE, f"complete, but its loss of {loss:.4g} is far above that of guessing")
        return Ending(EXIT_DONE, "complete")
