"""What a run prints: a table (a line for each epoch, or every N steps) and a progress bar, or its events as JSON lines.

Tables and JSON lines are made of the run's events. Sentences (`line`) and warnings (`warn`) are not events: ranks other
than 0, which have no events, print theirs, too.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.training.config import Log
from lockstep.training.files import json_text
from lockstep.training.launch.lines import say
from lockstep.training.parallel.world import World


class Console:
    """Rank 0 prints; the others only warnings, and sentences with `log.verbose`.

    Args:
        by_step: lines of `score` events (`log.score_every`) stand in place of the table of epochs.
    """

    def __init__(self, log: Log, world: World, epochs: int, steps_per_epoch: int, by_step: bool = False) -> None:
        self.log, self.world = log, world
        self._by_step = by_step
        self._header = False
        self._bar: Progress | None = None
        if world.leader and log.format == "table" and sys.stderr.isatty():
            columns = (
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, transient=True, redirect_stdout=True)
            self._task = self._bar.add_task("train", total=epochs * steps_per_epoch or None, epoch=1)
            self._bar.start()

    def line(self, text: str) -> None:
        """A sentence for people; none with `log.format=json`, whose output is for programs."""
        if (self.world.leader or self.log.verbose) and self.log.format == "table":
            say(text if self.world.leader else f"[rank {self.world.rank}] {text}")

    def per_class(self, accuracies: dict[str, float | None]) -> None:
        for name, accuracy in accuracies.items():
            self.line(
                f"Accuracy of {name:12}: " + ("no test sample" if accuracy is None else f"{100 * accuracy:6.2f} %")
            )

    def warn(self, text: str) -> None:
        """Always on stderr, whatever the format."""
        say(f"warning: rank {self.world.rank}: {text}", sys.stderr)

    def plan(self, steps: int) -> None:
        """Optimizer steps of the whole run, where they become known later."""
        if self._bar is not None:
            self._bar.update(self._task, total=steps)

    def step(self, epoch: int, done: int) -> None:
        """Moves the progress bar. `epoch` counts from 0, `done` are the steps of the whole run."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, epoch=epoch + 1)

    def on_event(self, event: dict[str, Any]) -> None:
        """A listener of `RunDirectory`: prints the event as JSON, or a line of the table where it has one."""
        if self.log.format == "json":
            if self.world.leader:
                say(json_text(event))
        elif event["event"] == "score":
            say(
                f"step {event['step'] - 1:5d} | train_loss {_number(event['train_loss'], 7)}"
                f" | test_loss {event['test_loss']:7.4f} | step time {1000 * event['step_seconds']:7.2f} ms"
            )
        elif event["event"] == "epoch" and not self._by_step:
            if not self._header:
                self._header = True
                say("epoch    batch    train time [sec]    validation accuracy    train loss [epoch]    images/s [run]")
            say(
                f"{event['epoch']:5d} {event['step']:8d} {event['trained_seconds']:19.2f} {'':9}"
                f"{_number(event['accuracy'], 13)} {_number(event['train_loss'], 21)} {event['images_per_second']:17.0f}"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _number(value: float | None, width: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.4f}"
