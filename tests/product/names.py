"""Names, exit codes, a backend, a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import JobSpec as JobSpec
from lockstep.jobs.status import Status as Status
from lockstep.jobs.status import Unreachable as Unreachable
from lockstep.training.contract import EXIT_DONE as EXIT_DONE
from lockstep.training.contract import EXIT_FAILED as EXIT_FAILED
from lockstep.training.contract import EXIT_PREEMPTED as EXIT_PREEMPTED
from lockstep.training.contract import EXIT_USAGE as EXIT_USAGE
from lockstep.training.contract import UserError as UserError

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.jobs.backend import Backend


def backend(name: str) -> type[Backend]:
    """The backend of that name on the command line: local, compose, k8s, slurm."""
    from lockstep.jobs import registry

    return registry.backend(name)


def checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors loaded. Raises the product's error where it is damaged."""
    from lockstep.training.checkpoint import store

    store.verify(path)
    loaded: dict[str, Any] = store.load(path)
    return loaded


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints of a run that verify, newest first. Raises where one does not."""
    from lockstep.training.checkpoint import store

    steps = []
    for path in store.candidates(run_dir / "checkpoints"):
        store.verify(path)
        steps.append(store.step_of(path))
    return steps


def newest_checkpoint(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint of a run that verifies, its tensors loaded."""
    return checkpoint(run_dir / "checkpoints" / f"step-{checkpoint_steps(run_dir)[0]:08d}")
