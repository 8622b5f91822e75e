"""The checkpoint that a start resumes from, and whether it fits the script's objects."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint import store
from ..checkpoint.state import UserState, parameter_names
from ..contract import ENV_LIVE, UserError, say
from ..observe.metrics import Metrics
from ..observe.rundir import RunDirectory
from ..parallel.world import World
from ..sync.base import GradientSync
from .replica import named_groups

Groups = dict[str, list[list[str]]]
"""Name of the optimizer → the names of the parameters in each of its groups."""


def newest_checkpoint(
    directory: RunDirectory | None, world: World, metrics: Metrics, verified: Path | None
) -> Path | None:
    """Returns this rank's newest verified checkpoint; None: it has none. Raises `UserError` if all are corrupt.

    Args:
        verified: a checkpoint that was verified a moment ago.
    """
    if directory is None:
        return None
    store.clean(directory.checkpoints)

    def warn(message: str) -> None:
        metrics.corrupt_file("checkpoint")
        directory.event("corrupt_checkpoint", message=message)
        say(f"warning: rank {world.rank}: {message}", sys.stderr)

    return store.newest_verified(directory.checkpoints, warn, verified)


def load(path: Path) -> dict[str, Any]:
    """Returns the gathered state of a verified checkpoint. Raises `UserError` if its files hold no state."""
    try:
        return dict(store.load(path))
    except (store.CorruptCheckpoint, TypeError, ValueError) as error:
        raise UserError(f"its checksums match, but {error} ({path}): restore it from a backup, or remove it") from None


@contextlib.contextmanager
def misfits_explained() -> Iterator[None]:
    """Turns errors in the block into `UserError`: the checkpoint verifies but does not fit the model, whose code has changed."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise UserError(
            f"the checkpoint does not fit the model or its optimizer ({type(error).__name__}: {(str(error).splitlines() or [''])[0]}): "
            "resume with the code that wrote it, or start over in another run directory"
        ) from error


def check_parameters(model: nn.Module, optimizers: dict[str, Any]) -> None:
    """Raises `ValueError` for a parameter of an optimizer that no checkpoint would hold."""
    known = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError(f"{name} has a parameter that is not in the replicated model: put it into the model")


def check_live(sync: GradientSync, of_rank: Mapping[str, Any]) -> None:
    """Raises `UserError` if `launch --live` cannot continue this run without a lost rank."""
    if not os.environ.get(ENV_LIVE):
        return
    if sync.batch_parts is None:
        raise UserError(
            f"launch --live needs sync.name=exact, under which any ranks compute the same, and this run has {sync.settings.name}: set it, "
            "or leave out --live"
        )
    if not Path("/proc/self/fd").is_dir():
        raise UserError("launch --live needs Linux, which shows a process its connections: leave out --live")
    if of_rank:
        raise UserError(
            f"launch --live cannot continue without a lost rank's state, and keep_of_rank() has {next(iter(of_rank))}: leave out --live"
        )


class Made:
    """The learning rates and groups of the optimizers from the script, before a checkpoint changes them."""

    def __init__(self, sync: GradientSync, optimizers: dict[str, Any]) -> None:
        self._sync, self._optimizers = sync, optimizers
        groups = named_groups(optimizers)
        self._rates = {name: float(group.get("initial_lr", group.get("lr", 0.0))) for name, group in groups}
        self._groups = self._current()

    def _current(self) -> Groups:
        return {name: parameter_names(self._sync, optimizer) for name, optimizer in self._optimizers.items()}

    def compare(self, kept: UserState, warn: Callable[[str], None]) -> None:
        """Warns if the script has other learning rates or groups than at the last start. Those of the checkpoint hold."""
        rates, kept.rates = kept.rates, self._rates
        changed = [
            f"{name}: {rates[name]:g} → {rate:g}" for name, rate in self._rates.items() if rates.get(name, rate) != rate
        ]
        if changed:
            warn(
                f"the script has changed a learning rate ({', '.join(changed)}), and the checkpoint's stays, with its schedule: set it "
                "after run.keep() to train with another"
            )
        made, current = self._groups, self._current()
        digests = {name: hashlib.sha256(repr(groups).encode()).hexdigest() for name, groups in made.items()}
        before, kept.groups = kept.groups, digests
        changed = [
            name for name in made if before.get(name, digests[name]) != digests[name] and made[name] != current[name]
        ]
        if changed:
            warn(
                f"the script has changed the groups of parameters of {', '.join(changed)}, and those of the checkpoint hold: change them "
                "after run.keep(), or start over in another run directory"
            )
