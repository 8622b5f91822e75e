"""The loop of every recipe: a script of `Session`, as anybody's own.

for each epoch, for each global batch:
    augment → forward → loss → backward → sum over the ranks → update → average
after each epoch: evaluate, save
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import optim
from ..config import Config
from ..data.augment import augment
from ..data.batches import Batch
from ..models.arithmetic import autocast, compiled, real_type
from ..observe.account import TimeCategory
from ..observe.goodput import GoodputRecorder
from ..optim import set_rates
from ..parallel.exchange import failing_together
from ..run.run import Run
from ..session import Session, session_of
from . import setup
from .evaluate import Evaluator, Score


def train(config: Config, run_dir: Path, fresh: bool | str, began: float) -> None:
    """Trains, or resumes, a run. Every rank calls it.

    Args:
        fresh: True starts over, but not at a restart by the launcher; a word does so unless the run was begun with it.
        began: `time.perf_counter()` at the start of the process, for the preprocessing time.

    Raises:
        SystemExit: 75 saved and to be run again; 1 diverged or not saved; 2 the config, the data or the run directory cannot be
            used.
    """
    start = Run(run_dir, config, fresh=fresh, began=began)
    with session_of(start) as run:
        recipe = Recipe(run, config, start)
        progress = Progress(run, config, recipe.evaluator, start.goodput)
        for epoch in run.epochs(config.epochs):
            for batch in run.batches(recipe.batches):
                recipe.step(batch)
                progress.step_done()
            if epoch + 1 == config.epochs or (epoch + 1) % config.evaluate.every == 0:
                progress.log(recipe.evaluator.score(run.for_evaluation(), run.boundary))
        _conclude(run, config, len(recipe.evaluator.classes))


class Recipe:
    """What a recipe says, ready for its first step. Collective. Raises `UserError` on all ranks where any of them cannot go on."""

    def __init__(self, run: Session, config: Config, start: Run) -> None:
        config = setup.in_form(run, config, start.form)
        data = setup.prepare(run, config)
        config = setup.with_compiler(run, config, data, start.form)
        run.settings = start.config = config
        self.run, self.config = run, config
        self.batches, self.model = data.batches, data.model
        self.network = run.replicate(data.model, setup.example(run, config, data))
        if config.compile:
            with failing_together(run.world):
                self.network = compiled(self.network, run.device, run.run_dir / "kernels")
        self.optimizer = run.optimizer(
            lambda parameters: optim.build(parameters, config, data.global_batch, data.model)
        )
        if config.ema.decay:
            run.average(config.ema.decay, config.ema.every)
        scales = config.precision == "float16" and config.nonfinite != "ignore"  # it looks at every gradient
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=scales)
        run.keep(**({"scaler": self.scaler} if self.scaler.is_enabled() else {}))
        setup.describe(run, config, data)
        with failing_together(run.world):
            self.evaluator = Evaluator(config, run.world, data.manifest)
        self._dtype = real_type(config.precision)

    def step(self, batch: Batch) -> None:
        run, config = self.run, self.config
        step, by_epoch = run.steps + 1, config.optim.schedule_unit == "epoch"
        set_rates(self.optimizer, config.optim, step / self.batches.division.steps if by_epoch else step)
        divisor = run.batch.total if config.loss.reduction == "mean" and run.batch is not None else 1
        run.step(self.loss, batch, divisor=divisor, clip=config.optim.clip, scaler=self.scaler)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses of these samples."""
        config = self.config
        x = augment(
            batch.images, batch.rows, batch.ids, config.data, batch.keys, self._dtype, config.channels_last is True
        )
        with autocast(config.precision, self.run.device):
            logits = self.network(x)
        smoothing = config.loss.smoothing
        return F.cross_entropy(logits.to(self._dtype), batch.labels, label_smoothing=smoothing, reduction="sum")


class Progress:
    """What is logged of the scores; with `log.score_every`, also within an epoch.

    An event `score` comes after the first step and every `log.score_every` steps from there: after step 1, 101, 201, … with 100.
    The table counts from 0, as the module's loop does (`if i % 100 == 0`), so its lines are those of steps 0, 100, 200, …
    `train_loss` is the mean loss of that step's global batch, before its update, and None where the step was left out;
    `test_loss` is of the whole test split, after it.
    With `data.split=exercise` both are of all its samples, after it. `step_seconds` is the mean seconds of a step since the last score.
    """

    def __init__(self, run: Session, config: Config, evaluator: Evaluator, goodput: GoodputRecorder) -> None:
        self._run, self._every, self._evaluator, self._goodput = run, config.log.score_every, evaluator, goodput
        self._same_samples = config.data.split == "exercise"
        self._last = (run.steps, run.seconds)

    def log(self, score: Score) -> None:
        self._run.log(accuracy=score.accuracy, test_loss=score.loss)
        self._run.summary["class_accuracy"] = score.by_class(self._evaluator.classes)

    def step_done(self) -> None:
        run = self._run
        if not self._every or (run.steps - 1) % self._every:
            return
        loss, seconds = run.loss(), run.seconds
        with self._goodput.on(TimeCategory.EVALUATION):
            score = self._evaluator.score(run.for_evaluation())
        if self._same_samples:
            loss = score.loss
        self.log(score)
        steps, since = run.steps - self._last[0], seconds - self._last[1]
        self._last = (run.steps, seconds)
        run.event(
            "score", step=run.steps, train_loss=loss, test_loss=score.loss, accuracy=score.accuracy,
            step_seconds=since / max(steps, 1),
        )  # fmt: skip


def _conclude(run: Session, config: Config, classes: int) -> None:
    """How it went, for people."""
    if (accuracy := run.history.get("accuracy")) is not None:
        run.print(f"Final validation accuracy: {accuracy:.4f}")
    if config.evaluate.per_class:
        for name, share in run.summary.get("class_accuracy", {}).items():
            run.print(f"Accuracy of {name:12}: " + ("no test sample" if share is None else f"{100 * share:6.2f} %"))
    loss, guessing = run.history.get("train_loss"), math.log(max(classes, 2))
    run.summary.pop("remark", None)
    if loss is not None and loss > 2 * guessing:
        run.summary["remark"] = f"its loss of {loss:.4g} is far above that of guessing"
        run.print(
            f"The loss at the end is {loss:.4g}; guessing among {classes} classes has {guessing:.2f}. The run has not learned: "
            "try a smaller lr."
        )
