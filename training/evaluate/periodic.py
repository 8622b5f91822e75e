"""A score every N steps instead of every epoch (`log.score_every`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.training.evaluate.evaluator import Score
from lockstep.training.observe.reading import mean_loss
from lockstep.training.run.prepare import Prepared


class PeriodicScore:
    """An event `score` after the first step and every `log.score_every` steps from there: after step 1, 101, 201, … with 100.

    The table counts from 0, as the module's loop does (`if i % 100 == 0`), so its lines are those of steps 0, 100, 200, …

    `train_loss` is the mean loss of that step's global batch, before its update, and None where the step was left out;
    `test_loss` is of the whole test split, after it.
    `step_seconds` is the mean seconds of a step since the last score.
    """

    def __init__(
        self, prepared: Prepared, score: Callable[[], Score | None], note: Callable[[Score | None], None]
    ) -> None:  # fmt: skip
        self.prepared, self.score, self.note = prepared, score, note
        state = prepared.state
        self._epoch, self._seen = state.cursor.epoch, state.losses.clone()
        self._last = (prepared.steps_done, state.clock.trained)

    def __call__(self) -> None:
        prepared, state = self.prepared, self.prepared.state
        before = self._seen if state.cursor.epoch == self._epoch else torch.zeros_like(self._seen)
        self._epoch, self._seen = state.cursor.epoch, state.losses.clone()
        if (prepared.steps_done - 1) % prepared.config.log.score_every:
            return
        state.clock.settle()
        loss = (self._seen - before).cpu()
        dist.all_reduce(loss)
        score = self.score()
        self.note(score)
        steps, seconds = prepared.steps_done - self._last[0], state.clock.trained - self._last[1]
        self._last = (prepared.steps_done, state.clock.trained)
        if score is not None:
            prepared.event(
                "score", step=prepared.steps_done, train_loss=mean_loss(*loss.tolist()), test_loss=score.loss,
                accuracy=score.accuracy, step_seconds=seconds / max(steps, 1),
            )  # fmt: skip
