"""Finds the checkpoint to resume from: the newest one that verifies, on any rank's disk."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.state import checked
from lockstep.training.contract import UserError
from lockstep.training.launch.lines import say
from lockstep.training.observe.metrics import Metrics
from lockstep.training.observe.rundir import RunDirectory
from lockstep.training.parallel.exchange import reduced
from lockstep.training.parallel.world import World

_RANKS = 1 << 20
"""More than there are. A step of 12 digits and a rank below it fit into one whole number of 64 bits."""


def newest_here(run: RunDirectory | None, world: World, metrics: Metrics) -> Path | None:
    """This rank's newest verified checkpoint; None where it keeps none. Raises `UserError` where all are corrupt."""
    if run is None:
        return None
    store.clean(run.checkpoints)

    def warn(message: str) -> None:
        metrics.corrupt_file("checkpoint")
        run.event("corrupt_checkpoint", message=message)
        say(f"warning: rank {world.rank}: {message}", sys.stderr)

    return store.newest_verified(run.checkpoints, warn)


def newest_of_all(own_checkpoint: Path | None, world: World) -> int | None:
    """The lowest rank that has the newest checkpoint of all ranks; None without a checkpoint. Collective.

    Args:
        own_checkpoint: this rank's newest verified checkpoint; None if it has none.
    """
    # One number for each rank: the largest one is that of the newest step, on the lowest rank that has it.
    number = 0 if own_checkpoint is None else (store.step_of(own_checkpoint) + 1) * _RANKS + (_RANKS - 1 - world.rank)
    largest = int(reduced(torch.tensor(number), world, torch.maximum))
    return _RANKS - 1 - largest % _RANKS if largest else None


def load(path: Path) -> dict[str, Any]:
    """The gathered state of a checkpoint that verifies. Raises `UserError` where it is not what a run saves."""
    try:
        return checked(store.load(path))
    except (store.CorruptCheckpoint, ValueError) as error:
        raise UserError(f"its checksums match, but {error} ({path}): restore it from a backup, or remove it") from None


@contextlib.contextmanager
def misfits_explained() -> Iterator[None]:
    """Turns errors into `UserError`: a checkpoint verifies but does not fit the model, whose code has changed."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"the checkpoint does not fit the model or its optimizer ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}): "
            "resume with the code that wrote it, or start over in another run directory"
        ) from error
