"""The one module of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this file. What needs torch is
imported by the function that uses it: the dispatcher's tests run without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep import JobSpec
from lockstep.jobs.status import Status, Unreachable
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.jobs.backend import Backend

__all__ = [
    "EXIT_DONE", "EXIT_FAILED", "EXIT_PREEMPTED", "EXIT_USAGE", "JobSpec", "Status", "Unreachable", "UserError", "backend",
    "checkpoint", "checkpoint_steps",
]  # fmt: skip

PUBLIC = {
    "lockstep.training.sync.horovod",
    "lockstep.training.sync.hooked",
    "lockstep.training.parallel.world",
    "lockstep.training.resilience.closeness",
    "lockstep.training.exercises.collectives",
}
"""Modules that the documentation tells users to import from; `lockstep` itself besides."""


# Dispatch


def backend(name: str) -> type[Backend]:
    """The backend of that name on the command line: local, compose, k8s, slurm."""
    from lockstep.jobs import registry

    return registry.backend(name)


# Checkpoints


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
