"""Sends the numbers of a run's events to TensorBoard and Weights & Biases (off by default); rank 0 only.

They listen to the run's events, so they show what events.jsonl holds, under the names of the speedruns' logs: `elapsed`,
`train_loss`, `val_acc`, `epoch`, `examples_seen`. One that fails is switched off with one warning; the run continues. It
has a thread of its own: a service, or a disk, that hangs holds no step up, and the end of the run for the grace period at most.
"""

from __future__ import annotations

import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import config as configuration
from .. import files
from ..config import RunSettings
from ..contract import UserError, say
from .rundir import Background, RunDirectory

TENSORBOARD = "tensorboard"
"""Folder of its event files in the run directory."""
WANDB_ID = "wandb.json"
"""File of the run directory with the identity of the run at W&B."""
_NAMES = {"trained_seconds": "elapsed", "accuracy": "val_acc"}
"""Names that differ: in events → as logged."""
_WANTED = ("trained_seconds", "epoch", "examples_seen", "images_per_second", "lr", "grad_norm", "step_duration",
           "sync_wait", "data_wait")  # fmt: skip
"""What is logged of an event that has it, with all that begins with `train_`. Scores have come with the event `log` before."""


Values = dict[str, float]
"""Numbers by their names."""
Log = Callable[[Values, int], None]
"""Takes values and their step."""
Close = Callable[[], None]


def attach(config: RunSettings, run: RunDirectory, step: int) -> None:
    """Makes the trackers that the config asks for, and lets them listen to the run.

    Args:
        step: optimizer steps done. What an earlier attempt logged beyond it is dropped: these steps are taken again.

    Raises:
        UserError: one of them is not installed.
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
    """The numbers of a `log`, `step`, `score` or `epoch` event, by the names they are logged under."""
    if event["event"] == "log":
        return {_NAMES.get(name, name): float(value) for name, value in event["values"].items()}
    if event["event"] not in ("step", "score", "epoch"):
        return {}
    wanted = [name for name in event if name in _WANTED or name.startswith("train_")]
    return {_NAMES.get(name, name): float(event[name]) for name in wanted if isinstance(event[name], (int, float))}


class _Listener:
    """Guards a tracker: an error switches the tracker off, and training does not wait for a tracker that hangs.

    Args:
        patience: seconds that the end of the run waits for it.
    """

    def __init__(self, name: str, make: Callable[[], tuple[Log, Close]], patience: float) -> None:
        self._name, self._patience = name, patience
        self._on = True
        self._tracker: tuple[Log, Close]
        self._thread = Background(name, self._late)
        self._guarded(lambda: setattr(self, "_tracker", make()))

    def on_event(self, event: dict[str, Any]) -> None:
        if self._on and (values := logged(event)):
            self._thread.run(lambda: self._guarded(lambda: self._tracker[0](values, event["step"])), seconds=0)

    def close(self) -> None:
        if self._on:
            self._thread.run(lambda: self._guarded(self._tracker[1]), seconds=self._patience)

    def _late(self) -> None:
        say(f"warning: {self._name} has not taken everything within {self._patience:g} s; the run ends", sys.stderr)

    def _guarded(self, action: Callable[[], None]) -> None:
        if not self._on:
            return
        try:
            action()
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a service's client raises
            self._on = False
            say(f"warning: {self._name} is off: {error}; the run continues", sys.stderr)


def _tensorboard(run: RunDirectory, step: int) -> tuple[Log, Close]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("log.tensorboard=true needs tensorboard: pip install tensorboard, or set it to false") from None
    _wait_for_a_later_second(run.path / TENSORBOARD)
    writer = SummaryWriter(str(run.path / TENSORBOARD), purge_step=step + 1)

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        if "val_acc" in values or "elapsed" in values:
            writer.flush()

    return log, writer.close


def _wait_for_a_later_second(folder: Path) -> None:
    """Waits until this second is later than that of every event file in the folder.

    TensorBoard reads its files in the order of their names, events.out.tfevents.SECOND.HOST.PID. Of two starts within one
    second the earlier could be read last, and what the later one has TensorBoard drop would then stay.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    stamps = [match[1] for name in names if (match := re.match(r"events\.out\.tfevents\.([0-9]{1,12})\.", name))]
    last = max(map(int, stamps), default=0)
    while 0 <= last - int(time.time()) <= 1:  # further ahead is another machine's clock, which no wait mends
        time.sleep(0.05)


def _wandb(config: RunSettings, run: RunDirectory) -> tuple[Log, Close]:
    try:
        import wandb
    except ImportError:
        raise UserError("log.wandb needs wandb: pip install wandb, or set it to null") from None
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
