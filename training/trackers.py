"""TensorBoard and Weights & Biases, for people who look at their runs there. Off by default; rank 0 only.

Both listen to the run's events, so they show what events.jsonl holds, under the names of the speedruns' logs: `elapsed`,
`train_loss`, `val_acc`, `epoch`, `examples_seen`. A service that fails is said once, and the run goes on without it.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from training import config as configuration
from training import files
from training.config import Config
from training.contract import UserError
from training.lines import say
from training.rundir import RunDirectory

TENSORBOARD = "tensorboard"
WANDB_ID = "wandb.json"
_NAMES = {"trained_seconds": "elapsed", "accuracy": "val_acc"}
_WANTED = ("trained_seconds", "train_loss", "test_loss", "accuracy", "epoch", "examples_seen", "images_per_second", "lr",
           "grad_norm", "step_duration", "sync_wait", "data_wait")  # fmt: skip


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def attach(config: Config, run: RunDirectory, step: int) -> None:
    """Lets the trackers that the config asks for listen to the run. Raises `UserError` where one is not installed.

    Args:
        step: where the run goes on; what was logged beyond it is taken again.
    """
    for wanted, make in ((config.log.tensorboard, _tensorboard), (config.log.wandb, _wandb)):
        if wanted:
            _Listener(make, config, run, step).listen()


def scalars(event: dict[str, Any]) -> dict[str, float]:
    """The numbers of a `step`, `score` or `epoch` event by the names they are logged under."""
    if event["event"] not in ("step", "score", "epoch"):
        return {}
    return {_NAMES.get(name, name): float(event[name]) for name in _WANTED if isinstance(event.get(name), (int, float))}


class _Listener:
    """Stands between the run and a tracker: nothing that the tracker raises reaches the training."""

    def __init__(self, make: Callable[..., Tracker], config: Config, run: RunDirectory, step: int) -> None:
        self._run, self._name = run, make.__name__.removeprefix("_")
        self._tracker: Tracker | None = None
        self._guarded(lambda: setattr(self, "_tracker", make(config, run, step)))

    def listen(self) -> None:
        self._run.listeners.append(self.on_event)
        self._run.at_close.append(self.close)

    def on_event(self, event: dict[str, Any]) -> None:
        values = scalars(event)
        tracker = self._tracker
        if values and tracker is not None:
            self._guarded(lambda: tracker.log(values, event["step"]))

    def close(self) -> None:
        if self._tracker is not None:
            self._guarded(self._tracker.close)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            self._tracker = None
            say(f"warning: {self._name} is off: {error}; the run goes on", sys.stderr)


def _tensorboard(config: Config, run: RunDirectory, step: int) -> Tracker:  # noqa: ARG001
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("log.tensorboard=true needs tensorboard: pip install tensorboard, or set it to false") from None
    _after_the_second_of_the_last_file(run.path / TENSORBOARD)
    return _TensorBoard(SummaryWriter(str(run.path / TENSORBOARD), purge_step=step + 1))


def _after_the_second_of_the_last_file(folder: Path) -> None:
    """TensorBoard reads its files by name, events.out.tfevents.SECOND.HOST.PID. Of two starts in one second the earlier
    could come last, and what it was told to purge would be the later one's."""
    names = os.listdir(folder) if folder.is_dir() else []
    stamps = [match[1] for name in names if (match := re.match(r"events\.out\.tfevents\.([0-9]{1,12})\.", name))]
    last = max(map(int, stamps), default=0)
    while 0 <= last - int(time.time()) <= 1:  # further ahead is another machine's clock, which no wait mends
        time.sleep(0.05)


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if "val_acc" in values or "elapsed" in values:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wandb(config: Config, run: RunDirectory, step: int) -> Tracker:  # noqa: ARG001
    try:
        import wandb
    except ImportError:
        raise UserError("log.wandb needs wandb: pip install wandb, or set it to null") from None
    saved = files.read_json(run.path / WANDB_ID)
    identity = saved.get("id") if isinstance(saved, dict) else None
    if not isinstance(identity, str):
        identity = uuid.uuid4().hex[:12]
        files.replace_json(run.path / WANDB_ID, {"id": identity})  # a restart goes on in the same run
    return _Wandb(
        wandb.init(
            project=config.log.wandb,
            name=run.path.name,
            id=identity,
            resume="allow",
            dir=str(run.path),
            config=configuration.to_dict(config),
            settings=wandb.Settings(silent=True),
        )
    )


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run
        # Its own step counter may not go back, and ours does after a kill.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
