"""The listeners of a run's events: the console, TensorBoard, and Weights & Biases. They show what events.jsonl holds.

The console prints a table (a line for each epoch, or every N steps), or the events as JSON lines. Sentences (`line`)
and warnings (`warn`) are not events: ranks other than 0, which have no events, print their warnings, too.

TensorBoard and Weights & Biases get numbers on rank 0 (off by default), under the names of the speedruns' logs: `elapsed`, `train_loss`,
`val_acc`, `epoch`, `examples_seen`. A tracker that fails is switched off with one warning; the run continues. Each gets its events in a
thread of its own. A service that hangs delays the end of the run by the grace period at most.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from .. import config as configuration
from .. import extras, files
from ..config import Log, RunSettings
from ..contract import UserError, say, to_stderr
from ..files import json_text
from ..limits import PROGRESS_SECONDS
from ..parallel.world import World
from .rundir import Background, RunDirectory

MAX_COLUMNS = 6
"""Most columns of logged numbers in the table of epochs."""


class Console:
    """The console of a rank. Rank 0 prints everything; the others print warnings.

    Args:
        now: returns the epoch of the last step, from 1, and the optimizer steps of the run so far.
        columns: the columns of measurements after each epoch. None: the logged numbers that are known after the first epoch.
    """

    def __init__(self, log: Log, world: World, now: Callable[[], tuple[int, int]], columns: list[str] | None) -> None:
        self.log, self.world, self._now, self._columns = log, world, now, columns
        self._header = False
        self.planned = 0
        """Optimizer steps of the whole run; 0: unknown so far."""
        self._means = ""
        """The text of the last reading: the mean loss of all ranks, and the other numbers of training."""
        self._reported: tuple[float, int] | None = None
        """(time, steps of the run) at the last line of progress, or at the first call of `progress`."""
        self._status: tuple[Any, float] = (None, -math.inf)
        """(the last printed status, its time). A changed status is printed at once."""

    def line(self, text: str) -> None:
        """Prints a sentence for people; nothing with `log.format=json`, whose output is for programs."""
        if self.world.leader and self.log.format == "table":
            say(text)

    def warn(self, text: str) -> None:
        """Prints a warning on stderr, with any format."""
        to_stderr(f"warning: rank {self.world.rank}: {text}")

    def progress(self) -> None:
        """Prints a line a minute. Called every few seconds."""
        (epoch, done), now = self._now(), time.monotonic()
        since, before = self._reported = self._reported or (now, done)
        if now - since >= PROGRESS_SECONDS:
            rate = (done - before) / (now - since)
            left = f" of {self.planned}, about {(self.planned - done) / rate / 60:.0f} min left" if self.planned else ""
            self.line(f"epoch {epoch}, step {done}{left}: {rate:.3g} steps/s{self._means}")
            self._reported = now, done

    def on_event(self, event: dict[str, Any]) -> None:
        """Prints an event as JSON, or as a line of the table if it has one. A listener of `RunDirectory`."""
        if event["event"] == "step" and event["train_loss"] is not None:
            self._means = "".join(f", {name} {value:.4g}" for name, value in _trained(event))
            if event["step"] in (1, self.planned) and not self._header and not self.log.score_every:
                self.line(f"step {event['step']}{self._means}")
        if self.log.format == "json":
            if self.world.leader and (event["event"] != "status" or self._is_news(event)):
                say(json_text(event))
        elif event["event"] == "score":
            say(
                f"step {event['step'] - 1:5d} | train_loss {_number(event['train_loss'], 7)}"
                f" | test_loss {event['test_loss']:7.4f} | step time {1000 * event['step_seconds']:7.2f} ms"
            )
        elif event["event"] == "epoch" and not self.log.score_every:  # else those lines replace the table of epochs
            self._epoch(event)

    def _is_news(self, status: dict[str, Any]) -> bool:
        """Returns whether to print this status.json: a line a minute and at each change, for readers of the log, as on Kubernetes."""
        state, now = (status["code"], status.get("ranks")), time.monotonic()
        if state == self._status[0] and now - self._status[1] < PROGRESS_SECONDS:
            return False
        self._status = state, now
        return True

    def _epoch(self, event: dict[str, Any]) -> None:
        """Prints a line of the table of epochs, with the logged numbers between the time and the loss."""
        trained = {f"train {name}": value for name, value in _trained(event) if name != "loss"}
        values = {**trained, **event["logged"], "validation accuracy": event["accuracy"]}
        if self._columns is None:
            self._columns = list({**trained, **event["logged"]})[:MAX_COLUMNS]
        if not self._header:
            self._header = True
            columns = "".join(f"{name:>{_width(name)}}" for name in self._columns)
            say(f"epoch     step    seconds{columns}   train loss   samples/s")
        numbers = "".join(_number(values.get(name), _width(name)) for name in self._columns)
        say(
            f"{event['epoch']:5d} {event['step']:8d} {event['trained_seconds']:10.2f}{numbers}"
            f"{_number(event['train_loss'], 13)}{event['images_per_second']:12.0f}"
        )


def _trained(event: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Returns (name, mean) over the samples of training."""
    return [(key.removeprefix("train_"), value) for key, value in event.items() if key.startswith("train_")]


def _width(name: str) -> int:
    """Returns the width of a column, in characters."""
    return 3 + max(len(name), 9)


def _number(value: float | None, width: int) -> str:
    return f"{'–':>{width}}" if value is None else f"{value:{width}.4f}"


TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's event files in the run directory."""
WANDB_ID = "wandb.json"
"""File of the run directory with the identity of the run at W&B."""
_NAMES = {"trained_seconds": "elapsed", "accuracy": "val_acc"}
"""Name in events → name in the trackers, if they differ."""
_WANTED = ("trained_seconds", "epoch", "examples_seen", "images_per_second", "lr", "grad_norm", "step_duration",
           "sync_wait", "data_wait")  # fmt: skip
"""Names of an event that the trackers get, besides all that begin with `train_`. The event `log` has brought the scores."""


Values = dict[str, float]
"""Name → number."""
Tracker = tuple[Callable[[Values, int], None], Callable[[], None]]
"""Its function of values and their step, and the function that ends it."""


def attach(config: RunSettings, run: RunDirectory, step: int) -> None:
    """Creates the trackers of the config as listeners of the run.

    Args:
        step: optimizer steps done. Later values of an earlier attempt are dropped, since these steps are taken again.

    Raises:
        UserError: a tracker is not installed.
    """
    for name, wanted, make in (
        ("tensorboard", config.log.tensorboard, partial(_tensorboard, run, step)),
        ("wandb", config.log.wandb, partial(_wandb, config, run)),
    ):
        if wanted:
            listener = _Listener(name, make, config.preempt.grace_seconds)
            run.listeners.append(listener.on_event)
            run.at_close.append(listener.close)


def logged(event: dict[str, Any]) -> Values:
    """Returns the numbers of a `log`, `step`, `score` or `epoch` event, by their names in the trackers."""
    if event["event"] == "log":
        return {_NAMES.get(name, name): float(value) for name, value in event["values"].items()}
    if event["event"] not in ("step", "score", "epoch"):
        return {}
    wanted = [name for name in event if name in _WANTED or name.startswith("train_")]
    return {_NAMES.get(name, name): float(event[name]) for name in wanted if isinstance(event[name], (int, float))}


class _Listener:
    """Guard of a tracker: an error switches the tracker off with one warning, and training does not wait for a tracker that hangs.

    Args:
        patience: seconds that the end of the run waits for the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], patience: float) -> None:
        self._name, self._patience = name, patience
        self._on = True
        self._tracker: Tracker = self._guarded(make)
        self._thread = Background(
            name, lambda: to_stderr(f"warning: {name} has not taken everything within {patience:g} s; the run ends")
        )

    def on_event(self, event: dict[str, Any]) -> None:
        if self._on and (values := logged(event)):
            self._thread.run(partial(self._guarded, self._tracker[0], values, event["step"]), seconds=0)

    def close(self) -> None:
        if self._on:
            self._thread.run(partial(self._guarded, self._tracker[1]), seconds=self._patience)

    def _guarded(self, action: Callable[..., Any], *values: Any) -> Any:
        """Returns the action's result; None: the tracker is off, or this failure switches it off."""
        try:
            return action(*values) if self._on else None
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            self._on = False
            to_stderr(f"warning: {self._name} is off: {error}; the run continues")


def _tensorboard(run: RunDirectory, step: int) -> Tracker:
    with extras.explained():
        from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(str(run.path / TENSORBOARD), purge_step=step + 1)

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        if "val_acc" in values or "elapsed" in values:
            writer.flush()

    return log, writer.close


def _wandb(config: RunSettings, run: RunDirectory) -> Tracker:
    with extras.explained():
        import wandb
    saved = files.read_json(run.path / WANDB_ID)
    identity = saved.get("id") if isinstance(saved, dict) else None
    if not isinstance(identity, str):
        identity = uuid.uuid4().hex[:12]
        files.replace_json(run.path / WANDB_ID, {"id": identity})  # a restart resumes the same run
    theirs = wandb.init(
        project=config.log.wandb, name=run.path.name, id=identity, resume="allow", dir=str(run.path),
        config=configuration.to_dict(config), settings=wandb.Settings(silent=True),
    )  # fmt: skip
    # Its own step counter may not go back, and ours does after a kill.
    theirs.define_metric("step")
    theirs.define_metric("*", step_metric="step")

    def log(values: Values, step: int) -> None:
        theirs.log({"step": step, **values})

    return log, theirs.finish
