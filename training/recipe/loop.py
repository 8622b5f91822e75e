"""The loop of every recipe: a script of `Session`, like a user's own.

for each epoch, for each global batch:
    augment → forward → loss → backward → sum over the ranks → update → average
after each epoch: evaluate, save
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import generators, models, optim, sync
from ..checkpoint import weights
from ..config import Config
from ..contract import UserError
from ..data.augment import augment, check_settings, draw_keys, normalise
from ..data.batches import Batch, Batches, Division, Stored
from ..data.shard_writer import verified
from ..data.shards import Manifest, Samples
from ..models.arithmetic import (
    arithmetic_of,
    autocast,
    compiled,
    form_on,
    no_compiler,
    real_type,
)
from ..observe.account import TimeCategory
from ..optim import set_rates
from ..parallel.exchange import all_gather_trees, broadcast_tree, failing_together
from ..parallel.world import World
from ..run.run import Run
from ..session import Session, session_of
from .evaluate import Evaluator, Score

RATE, COMPILED_SAVES, COMPILING = 1e14, 0.2, 40.0
"""Operations a second of a training step in half precision, the share of its time that compilation saves, and the seconds of
compilation. Measured with speedrun and bag_of_tricks on an H100, and rounded so that short trainings are not compiled."""


def train(config: Config, run_dir: Path, fresh: bool | str, began: float) -> None:
    """Trains, or resumes, a run. Every rank calls it.

    Args:
        fresh: True starts over, but not at a restart by the launcher; a word does so unless the run was begun with it.
        began: `time.perf_counter()` at the start of the process, for the preprocessing time.

    Raises:
        SystemExit: 75 saved and to be run again; 1 diverged or not saved; 2 config, data or run directory cannot be used.
    """
    start = Run(run_dir, config, fresh=fresh, began=began)
    with session_of(start) as run:
        recipe = Recipe(run, config, start)
        for epoch in run.epochs(config.epochs):
            for batch in run.batches(recipe.batches):
                recipe.step(batch)
                recipe.score_step()
            if epoch + 1 == config.epochs or (epoch + 1) % config.evaluate.every == 0:
                recipe.log(recipe.evaluator.score(run.for_evaluation(), run.boundary))
        _conclude(run, config, len(recipe.evaluator.classes))


class Recipe:
    """What a recipe says, ready for its first step. Collective. Raises `UserError` on all ranks if any of them fails.

    Each part that can fail on one rank alone runs in `failing_together`: all ranks continue, or all stop with one sentence.
    """

    def __init__(self, run: Session, config: Config, start: Run) -> None:
        self.run, world = run, run.world
        self.config = config = _decided(run, config, start.form, **form_on(run.device))
        self.manifest = manifest = verified(config.data, world)
        with failing_together(world):
            check_settings(config, manifest.shape)
        _check_same_data(manifest, run.facts.get("data"), world)
        size = run.facts.get("global_batch_size") or config.global_batch_size or (config.batch_size or 0) * world.size
        run.facts.update(global_batch_size=size, data={"name": manifest.source, "checksum": manifest.checksum})
        with failing_together(world):
            self._strategy = sync.build(config.sync)
            if config.compile is True and not self._strategy.compiles:
                raise self._strategy.refuse("does not take compile=true", "set compile=false, or use sync.name=flat")
            self.model = _build(config, world, manifest)
            self.batches = self._batches(size)
            if not run.resumed and run.leader:
                self._initial_weights()
        run.settings = start.config = self.config = config = _decided(run, config, start.form, compile=self._repays)
        self.network = run.replicate(self.model, self._example())
        if config.compile:
            with failing_together(world):
                self.network = compiled(self.network, run.device, run.run_dir / "kernels")
        self.optimizer = run.optimizer(lambda parameters: optim.build(parameters, config, size, self.model))
        if config.ema.decay:
            run.average(config.ema.decay, config.ema.every)
        scales = config.precision == "float16" and config.nonfinite != "ignore"  # it looks at every gradient
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=scales)
        run.keep(**({"scaler": self.scaler} if self.scaler.is_enabled() else {}))
        if config.log.score_every:
            run.print(
                f"model={config.model} global_batch_size={size} optim={config.optim.name} lr={config.optim.lr:g} "
                f"sync={config.sync.name} uneven={config.uneven}, {self.batches.division.steps} steps an epoch"
            )
        run.summary.update(global_batch_size=size, data=run.facts["data"])
        with failing_together(world):
            self.evaluator = Evaluator(config, world, manifest)
        self._goodput = start.goodput
        self._scored = (run.steps, run.seconds)
        """When the last event `score` came, or the run began or was resumed."""

    def _batches(self, size: int) -> Batches:
        """Returns the batches of the training samples, for this global batch size."""
        config, world = self.config, self.run.world
        division = Division(
            self.manifest.count("train"), size, world, config.seed, uneven=config.uneven, shuffle=config.data.shuffle != "none",
            multiple=models.batch_multiple(self.model), parts=self._strategy.batch_parts,
        )  # fmt: skip
        self._samples = Samples.open(self.manifest, "train")
        return Batches(Stored(self._samples, world, config.seed, config.data.resident), division)

    def _repays(self) -> bool:
        """Whether a compiled network repays its compiling: for `compile: auto`."""
        world, config, division = self.run.world, self.config, self.batches.division
        compiles = self._strategy.compiles and not config.exact
        if world.device.type != "cuda" or not compiles or no_compiler(world.device):
            return False
        samples = config.epochs * division.steps * division.batch / world.size
        operations = 3 * arithmetic_of(self.model, self._example()) * samples
        return operations / RATE * COMPILED_SAVES > COMPILING

    def _initial_weights(self) -> None:
        """Whitening and the like happen once, on rank 0; `init_from` is read there too. All ranks then get its weights."""
        config, model = self.config, self.model
        if config.init_from is not None:
            path = Path(config.init_from)
            weights.assign(model, weights.read(path), path)
        elif callable(whiten := getattr(model, "prepare", None)):
            images = self._first_images(10_000).to(next(model.parameters()).device)
            whiten(normalise(images, config.data, real_type(config.precision), False))

    def _first_images(self, count: int) -> torch.Tensor:
        """Returns the first training images, uint8 [n, h, w, c], or the first vectors."""
        return self._samples.take(torch.arange(min(count, len(self._samples))))[0]

    def _example(self) -> torch.Tensor:
        """A few samples as the network will see them."""
        images = self._first_images(max(self.batches.division.multiple, 2)).to(self.run.device)
        rows = torch.arange(len(images), device=images.device)
        return self._augmented(Batch(images, rows, rows, rows, draw_keys(self.config.seed, 0)))

    def _augmented(self, batch: Batch) -> torch.Tensor:
        config = self.config
        dtype, channels_last = real_type(config.precision), config.channels_last is True
        return augment(batch.images, batch.rows, batch.ids, config.data, batch.keys, dtype, channels_last)

    def step(self, batch: Batch) -> None:
        run, config = self.run, self.config
        step, by_epoch = run.steps + 1, config.optim.schedule_unit == "epoch"
        set_rates(self.optimizer, config.optim, step / self.batches.division.steps if by_epoch else step)
        divisor = run.batch.total if config.loss.reduction == "mean" and run.batch is not None else 1
        run.step(self.loss, batch, divisor=divisor, clip=config.optim.clip, scaler=self.scaler)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The sum of the losses of these samples."""
        config = self.config
        x = self._augmented(batch)
        with autocast(config.precision, self.run.device):
            logits = self.network(x)
        smoothing = config.loss.smoothing
        return F.cross_entropy(logits.to(x.dtype), batch.labels, label_smoothing=smoothing, reduction="sum")

    def log(self, score: Score) -> None:
        self.run.log(accuracy=score.accuracy, test_loss=score.loss)
        self.run.summary["class_accuracy"] = score.by_class(self.evaluator.classes)

    def score_step(self) -> None:
        """With `log.score_every`, logs the scores within an epoch.

        An event `score` comes after the first step and every `log.score_every` steps from there: after step 1, 101, 201, … with 100.
        The table counts from 0, as the module's loop does (`if i % 100 == 0`), so its lines are those of steps 0, 100, 200 and so on.
        `train_loss` is the mean loss of that step's global batch, before its update, and None if the step was left out.
        `test_loss` is of the whole test split, after it. With `data.split=exercise` both are of all its samples, after it.
        `step_seconds` is the mean seconds of a step since the last score.
        """
        run, every = self.run, self.config.log.score_every
        if not every or (run.steps - 1) % every:
            return
        loss, seconds = run.loss(), run.seconds
        with self._goodput.on(TimeCategory.EVALUATION):
            score = self.evaluator.score(run.for_evaluation())
        if self.config.data.split == "exercise":
            loss = score.loss
        self.log(score)
        steps, since = run.steps - self._scored[0], seconds - self._scored[1]
        self._scored = (run.steps, seconds)
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


# What a recipe runs on.


def _decided(run: Session, config: Config, begun: Mapping[str, Any], **choices: Callable[[], Any]) -> Config:
    """The config where those of these settings that are `auto` have what the run began with, else the choice of rank 0. Collective."""
    wanted = [name for name in choices if getattr(config, name) == "auto"]
    if not wanted:
        return config
    with failing_together(run.world):
        chosen = {name: begun[name] if name in begun else choices[name]() for name in wanted}
    return config.model_copy(update=broadcast_tree(chosen, run.world))


def _check_same_data(manifest: Manifest, saved: dict[str, str] | None, world: World) -> None:
    """Every rank has the data that the run began with. Collective."""
    checksums = all_gather_trees(manifest.checksum, world)
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise UserError(
                f"the ranks see different data: rank 0: {checksums[0][:12]}…, rank {rank}: {checksum[:12]}…"
            )
    if saved and saved.get("checksum") != manifest.checksum:
        raise UserError(
            f"{manifest.place} holds other data than this run began with (sha256 {manifest.checksum[:12]}…, "
            f"the run's {str(saved.get('checksum'))[:12]}…): restore it, or choose another --run-dir"
        )


def _build(config: Config, world: World, manifest: Manifest) -> nn.Module:
    # Rank 0's draw counts; the others differ, so that a missing broadcast shows.
    generators.seed(config.seed + world.rank)
    model = models.build(config.model, config.model_options, len(manifest.classes), manifest.shape)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {config.model} has no parameter that requires a gradient: there is nothing to train")
    if not model.training:
        model.train()
    model.to(device=world.device, dtype=real_type(config.precision))
    return model.to(memory_format=torch.channels_last) if config.channels_last is True else model
