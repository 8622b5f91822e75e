"""A run of a loop of one's own: its model, what it keeps, and what is told of its epochs."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.training import sync as strategies
from lockstep.training.checkpoint import generators
from lockstep.training.checkpoint.kept import Kept
from lockstep.training.checkpoint.state import averaged_buffers
from lockstep.training.config import OwnSettings, Sync
from lockstep.training.config.types import LOGGED
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError
from lockstep.training.optim.ema import Ema
from lockstep.training.parallel.exchange import broadcast_tree
from lockstep.training.parallel.world import World
from lockstep.training.run.attempt import Attempt, Ending
from lockstep.training.run.context import RunContext
from lockstep.training.run.summary import stands
from lockstep.training.sync.base import BuildOptimizer, GradientSync

MOST_LOGGED = 100
"""Names that a script may log: each is a series of Prometheus on every rank."""


@dataclass(slots=True)
class Replica:
    """The model, as the script wrote it and as the strategy wrapped it, and what optimizes it."""

    model: nn.Module
    network: nn.Module
    sync: GradientSync
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    ema: Ema | None = None

    @classmethod
    def wrap(cls, model: nn.Module, settings: Sync, world: World, example: Any) -> Replica:
        """On the rank's device, with rank 0's weights. Raises `UserError` for a model that the strategy does not support."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"replicate() takes a model, an instance of torch.nn.Module; got {_what(model)}")
        model.to(world.device)
        strategy = strategies.build(settings)
        return cls(model, strategy.wrap(model, world, example), strategy)

    def add_optimizer(self, build: BuildOptimizer, name: str) -> torch.optim.Optimizer:
        if isinstance(build, torch.optim.Optimizer) or not callable(build):
            raise TypeError(
                "optimizer() takes a function that makes the optimizer for the parameters that it gets, such as "
                f"lambda parameters: torch.optim.SGD(parameters, lr=0.1); got {_what(build)}"
            )
        if name in self.optimizers:
            raise ValueError(f"optimizer({name}) was called twice with this name: give the second one another name")
        if self.optimizers and self.sync.settings.name in ("zero1", "fsdp", "hooks", "horovod"):
            raise self.sync.refuse("takes one optimizer", "use sync.name=flat or ddp for several")

        def checked(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = build(parameters)
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"the function of optimizer() returns a torch.optim.Optimizer; got {_what(optimizer)}")
            return optimizer

        self.optimizers[name] = self.sync.make_optimizer(checked)
        return self.optimizers[name]

    def averaged(self, decay: float, every: int) -> None:
        if not 0 < decay < 1 or every < 1:
            raise ValueError(f"average() takes a decay in (0, 1) and every from 1, got {decay} and {every}")
        self.ema = Ema(self.model, decay, every, self.sync.duplicate())

    @torch.no_grad()
    def for_evaluation(self, world: World) -> nn.Module:
        """A copy with full weights (the average, where there is one) and mean batch statistics. Collective."""
        source = self.ema.average if self.ema else self.model
        model = self.sync.full_module(source)
        buffers = averaged_buffers(model, world)
        model = copy.deepcopy(model) if model is source else model
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return model.eval()


def _what(value: object) -> str:
    """A value as an error names it."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"


@dataclass(slots=True, kw_only=True)
class OwnRun(RunContext):
    """An attempt at a run of a loop of one's own."""

    config: OwnSettings
    kept: Kept
    saved_generators: dict[str, Any] | None
    """This rank's generators as they were where the run goes on, until the loop is there again."""
    epochs_planned: int = 0
    went_on: bool = False
    """A step was made, or an epoch ended, in this attempt."""
    epoch_is_through: bool = False
    """The loop over the batches of the epoch under way has ended, in this attempt."""

    @property
    def steps_done(self) -> int:
        return self.kept.steps

    def complete(self, epochs: int) -> bool:
        self.epochs_planned = epochs
        return self.state.cursor.epoch >= epochs

    def plan(self, steps_per_epoch: int) -> None:
        """The length of an epoch is known."""
        planned = self.epochs_planned * steps_per_epoch
        if planned:
            self.metrics.planned(planned)
            self.console.plan(planned)

    def expect_data(self, about: dict[str, Any]) -> None:
        """Raises `UserError` where the epoch was begun with other batches, and the run goes on in its middle; `RuntimeError` for
        a second loop in one epoch."""
        if self.epoch_is_through:
            raise RuntimeError(
                "the batches of this epoch are through: begin each epoch with `for epoch in run.epochs(…)`, and go over the "
                "loader of an evaluation itself, without run.batches() or run.iterate()"
            )
        before, kept = self.kept.data, self.state.cursor.step
        if kept and before != about:
            different = [
                f"{name}: {before.get(name)} → {about.get(name)}"
                for name in sorted(before.keys() | about.keys())
                if before.get(name) != about.get(name)
            ]
            raise UserError(
                f"the run goes on after batch {kept} of an epoch that was divided differently ({'; '.join(different)}): "
                "undo the change, or start over in another run directory"
            )
        self.kept.data = about

    # The generators of this process, so that what a resumed loop draws is what it would have drawn.

    def begin_epoch(self) -> None:
        """The script may draw here what it draws once an epoch, in the middle of an epoch too."""
        if self.state.cursor.step and self.kept.epoch_generators is not None:
            generators.restore(self.kept.epoch_generators, self.world.device)
        elif self.saved_generators is not None and not self.state.cursor.step:
            self.resume_generators()
            self.kept.epoch_generators = generators.capture(self.world.device)
        else:
            self.kept.epoch_generators = generators.capture(self.world.device)

    def resume_generators(self) -> None:
        """The loop is where the checkpoint was taken."""
        self.kept.cursor_generators = None
        if self.saved_generators is not None:
            generators.restore(self.saved_generators, self.world.device)
            self.saved_generators = None

    def pause_generators(self) -> None:
        """The epoch's batches are all there: what is drawn from here on, in an evaluation, is drawn again after a resume."""
        self.kept.cursor_generators = generators.capture(self.world.device)
        self.epoch_is_through = True

    def end_epoch(self, attempt: Attempt, epochs: int) -> None:
        """Tells of the epoch, moves the cursor to the next one, and saves where it is time to. Raises `Ended`."""
        state, kept, config = self.state, self.kept, self.config
        state.clock.settle()
        attempt.tell_readings(wait=True)
        loss = attempt.epoch_loss()
        state.cursor.epoch, state.cursor.step, self.went_on = state.cursor.epoch + 1, 0, True
        kept.data, kept.epoch_generators, kept.cursor_generators = {}, None, None
        self.epoch_is_through = False
        accuracy, test_loss = kept.logged_in_epoch.get("accuracy"), kept.logged_in_epoch.get("test_loss")
        state.history.update(train_loss=loss)
        kept.logged_in_epoch = {}
        self.event(
            "epoch", epoch=state.cursor.epoch, step=kept.steps, trained_seconds=round(state.clock.trained, 4),
            train_loss=loss, accuracy=accuracy, test_loss=test_loss, examples_seen=kept.samples,
            images_per_second=kept.samples / max(state.clock.trained, 1e-9),
        )  # fmt: skip
        last, every_epoch = self.complete(epochs), config.checkpoint.every_steps == 0
        if last or every_epoch or attempt.saver.due_by_step() or self._best_is_due():
            attempt.save()

    def _best_is_due(self) -> bool:
        """Whether rank 0 has been told of a score of these weights that is the best so far. Collective."""
        return bool(broadcast_tree(self.scores.asks(self.steps_done), self.world))

    def log(self, numbers: Mapping[str, float]) -> None:
        """Raises `ValueError` for a name that no metric can have, or too many; `TypeError` for a value that is not a number."""
        told = {}
        for name, value in numbers.items():
            if not re.fullmatch(LOGGED, name):
                raise ValueError(f"log({name}=…): a name has letters, digits and _, at most 64")
            try:
                told[name] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"log({name}=…) takes a number, got {type(value).__name__}") from None
        if len(self.kept.logged.keys() | told.keys()) > MOST_LOGGED:
            raise ValueError(f"more than {MOST_LOGGED} names are logged: keep numbers of a step in fewer names")
        self.kept.logged |= told
        self.kept.logged_in_epoch |= told
        self.scores.note(told, self.steps_done)
        self.state.history.update({name: told[name] for name in ("accuracy", "test_loss") if name in told})
        for name, value in told.items():
            self.metrics.logged(name, value)
        if "accuracy" in told:
            self.metrics.accuracy(told["accuracy"])
        self.event("log", step=self.kept.steps, epoch=self.state.cursor.epoch, **{"values": told})

    def finish(self, attempt: Attempt, began: float) -> Ending:
        """The script has ended: the last save, and the summary. Raises `Ended`."""
        if self._best_is_due() or attempt.saver.steps_since:
            attempt.save()
        trained, history = max(self.state.clock.trained, 1e-9), self.state.history
        saved = attempt.saver.durable()
        summary = {
            "recipe": self.config.script, "sync": self.config.sync.name, "world_size": self.world.size,
            "steps": self.steps_done, "epochs": self.state.cursor.epoch, "train_loss": history.get("train_loss"),
            "test_loss": history.get("test_loss"), "accuracy": history.get("accuracy"),
            "best_accuracy": history.get("best_accuracy"), "images_per_second": self.kept.samples / trained,
            "examples_seen": self.kept.samples, "trained_seconds": trained,
            "wall_seconds": time.perf_counter() - began, "restarts": self.attempt - 1,
            "preemptions": history.get("preemptions", 0), "checkpoint_failures": attempt.saver.failures,
            "config_hash": self.config.hash(), "logged": self.kept.logged,
        }  # fmt: skip
        if self.went_on or not stands(self):
            if self.run is not None and self.world.leader:
                self.run.summary(summary)
            self.event("done", **summary)
        if not saved:
            return Ending(EXIT_FAILED, "finished, but the last checkpoint could not be saved (see the warnings)")
        return Ending(EXIT_DONE, "complete")
