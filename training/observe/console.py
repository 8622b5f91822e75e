"""What a run prints: a table (a line for each epoch, or every N steps) and a progress bar, or its events as JSON lines.

Tables and JSON lines are made of the run's events. Sentences (`line`) and warnings (`warn`) are not events: ranks other
than 0, which have no events, print theirs, too.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config import Log
from ..contract import say
from ..files import json_text
from ..limits import PROGRESS_SECONDS
from ..parallel.world import World
from .clock import Observer, StepDone

MAX_COLUMNS = 6
"""Of what is logged, in the table of epochs."""
OTHER_COLUMNS = 50
"""Width of the others: epoch, step, seconds, loss and speed."""


class Console(Observer):
    """Rank 0 prints; the others only warnings, and sentences with `log.verbose`.

    Args:
        by_step: lines of `score` events (`log.score_every`) stand in place of the table of epochs.
        columns: what is measured after each epoch; None: what is logged, as far as it is known after the first one.
    """

    def __init__(
        self, log: Log, world: World, by_step: bool = False, columns: list[str] | None = None,
    ) -> None:  # fmt: skip
        self.log, self.world = log, world
        self._by_step, self._columns = by_step, columns
        self._header = False
        self.planned = 0
        """Optimizer steps of the whole run; 0 where they are not known (yet)."""
        self._means = ""
        """The mean loss of all ranks, and what else they train by, at the last reading, as it is shown."""
        self._told: tuple[float, int] | None = None
        """When progress was last printed, or the first step came, and how far it was."""
        self._status: tuple[Any, float] = (None, -math.inf)
        """Of the status that was printed last: what is printed at once where it changes, and when that was."""
        self._bar: Progress | None = None
        if world.leader and log.format == "table" and sys.stderr.isatty():
            shown = (
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[pace]}"),
            )
            self._bar = Progress(*shown, transient=True, redirect_stdout=True)
            self._task = self._bar.add_task("train", total=None, epoch=1, pace="")
            self._bar.start()

    def line(self, text: str) -> None:
        """A sentence for people; none with `log.format=json`, whose output is for programs."""
        if (self.world.leader or self.log.verbose) and self.log.format == "table":
            say(text if self.world.leader else f"[rank {self.world.rank}] {text}")

    def warn(self, text: str) -> None:
        """Always on stderr, whatever the format."""
        say(f"warning: rank {self.world.rank}: {text}", sys.stderr)

    def plan(self, steps: int) -> None:
        """Optimizer steps of the whole run are known."""
        self.planned = steps
        if self._bar is not None:
            self._bar.update(self._task, total=steps)

    def step_done(self, step: StepDone) -> None:
        """Moves the progress bar; without one, prints a line a minute."""
        epoch, done = step.epoch, step.step
        if self._bar is not None:
            speed = self._bar.tasks[self._task].speed
            pace = f"{speed:.3g} steps/s{self._means}" if speed else ""
            self._bar.update(self._task, completed=done, epoch=epoch + 1, pace=pace)
            return
        now = time.monotonic()
        since, before = self._told or (now, done)
        if now - since >= PROGRESS_SECONDS:
            rate = (done - before) / (now - since)
            left = f" of {self.planned}, about {(self.planned - done) / rate / 60:.0f} min left" if self.planned else ""
            self.line(f"epoch {epoch + 1}, step {done}{left}: {rate:.3g} steps/s{self._means}")
        if self._told is None or now - since >= PROGRESS_SECONDS:
            self._told = now, done

    def on_event(self, event: dict[str, Any]) -> None:
        """A listener of `RunDirectory`: prints the event as JSON, or a line of the table where it has one."""
        if event["event"] == "step" and event["train_loss"] is not None:
            self._means = "".join(f", {name} {value:.4g}" for name, value in _trained(event))
            if event["step"] in (1, self.planned) and not self._header and not self._by_step:
                self.line(f"step {event['step']}{self._means}")
        if self.log.format == "json":
            if self.world.leader and (event["event"] != "status" or self._is_news(event)):
                say(json_text(event))
        elif event["event"] == "score":
            say(
                f"step {event['step'] - 1:5d} | train_loss {_number(event['train_loss'], 7)}"
                f" | test_loss {event['test_loss']:7.4f} | step time {1000 * event['step_seconds']:7.2f} ms"
            )
        elif event["event"] == "epoch" and not self._by_step:
            self._epoch(event)

    def _is_news(self, status: dict[str, Any]) -> bool:
        """Whether to print this status.json: a line a minute and at each change, for who sees the log alone, as on Kubernetes."""
        state, now = (status["code"], status.get("ranks")), time.monotonic()
        if state == self._status[0] and now - self._status[1] < PROGRESS_SECONDS:
            return False
        self._status = state, now
        return True

    def _epoch(self, event: dict[str, Any]) -> None:
        """A line of the table of epochs: what was logged, between the time and the loss."""
        trained = {f"train {name}": value for name, value in _trained(event) if name != "loss"}
        values = {**trained, **event["logged"], "validation accuracy": event["accuracy"]}
        if self._columns is None:
            self._columns = self._fitting({**trained, **event["logged"]})
        if not self._header:
            self._header = True
            columns = "".join(f"{name:>{_width(name)}}" for name in self._columns)
            say(f"epoch     step    seconds{columns}   train loss   samples/s")
        numbers = "".join(_number(values.get(name), _width(name)) for name in self._columns)
        say(
            f"{event['epoch']:5d} {event['step']:8d} {event['trained_seconds']:10.2f}{numbers}"
            f"{_number(event['train_loss'], 13)}{event['images_per_second']:12.0f}"
        )

    def _fitting(self, names: Iterable[str]) -> list[str]:
        """Those of what is logged that a line of the terminal has room for."""
        room = shutil.get_terminal_size().columns - OTHER_COLUMNS if self._bar is not None else math.inf
        found: list[str] = []
        for name in names:
            if _width(name) <= room and len(found) < MAX_COLUMNS:
                found.append(name)
                room -= _width(name)
        return found

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _trained(event: dict[str, Any]) -> list[tuple[str, float | None]]:
    """The means over the samples that were trained on, by their names."""
    return [(key.removeprefix("train_"), value) for key, value in event.items() if key.startswith("train_")]


def _width(name: str) -> int:
    """Of a column."""
    return 3 + max(len(name), 9)


def _number(value: float | None, width: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.4f}"
