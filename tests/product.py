"""The one module of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this file. What needs torch is
imported by the function that uses it: the dispatcher's tests run without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep import JobSpec
from lockstep.jobs.status import Status, Unreachable
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

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


# Kubernetes


@contextlib.contextmanager
def kubernetes(
    interval: float = 0.2, lost_after: float = 1.0, timeout: float = 5.0, attempts: int = 5,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Any]:  # fmt: skip
    """The Kubernetes backend of $KUBECONFIG. `sleep`: what it does between two attempts at a request."""
    from lockstep.jobs.kubernetes.api import Api, load_configuration
    from lockstep.jobs.kubernetes.backend import KubernetesBackend

    load, namespace = load_configuration(None)
    api = Api(load, timeout, attempts, sleep)
    yield KubernetesBackend(api, namespace, interval, lost_after)
    api.close()


def on_clock(backend: Any, clock: Any, patch: pytest.MonkeyPatch) -> None:
    """The Kubernetes backend lives by a clock of the test's own, with the patience that it has by itself."""
    backend.interval, backend.lost_after = 10.0, 300.0
    patch.setattr("lockstep.jobs.backend.time", clock)
    patch.setattr("lockstep.jobs.kubernetes.backend.time", clock)
    patch.setattr(backend, "pause", lambda job, seconds: clock.sleep(min(seconds, backend.interval)))


def manifests(name: str, spec: JobSpec) -> tuple[list[dict[str, Any]], str]:
    """What a cluster's backend makes of a job: the objects, and the text that `render` prints."""
    from lockstep.jobs.manifest import to_yaml

    objects = backend(name).manifests(spec)  # type: ignore[attr-defined]
    return objects, to_yaml(objects)


def findings(name: str, spec: JobSpec, objects: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the rules of a cluster's backend find in a job, or in other objects for it: id → finding."""
    found = backend(name).rules().apply(spec, manifests(name, spec)[0] if objects is None else objects)  # type: ignore[attr-defined]
    return {item.id: item for item in found}


def rules(name: str) -> set[str]:
    """The ids of those rules."""
    return {rule.id for rule in backend(name).rules().all()}  # type: ignore[attr-defined]


def files_of_code(packed: bytes, identity: str) -> set[str]:
    """The paths in an archive of code. Raises where it is damaged, or another one than that of the identity."""
    from lockstep.training.launch import archive

    return {file.path for file in archive.read(packed, identity)}


def execute(job_backend: Any, name: str, command: list[str], rank: int, streams: tuple[Any, Any, Any]) -> int:
    """`lockstep exec` with these three files for its streams: the exit code."""
    from lockstep.jobs.foreground import Streams

    code: int = job_backend.execute(name, command, rank, Streams(*(stream.fileno() for stream in streams)))
    return code


def ping_every(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """How often a quiet connection to a pod is kept alive."""
    patch.setattr("lockstep.jobs.kubernetes.channels.PING_SECONDS", seconds)


def give_up_policies_after(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """How long a submission to Kubernetes tries to make its NetworkPolicy."""
    patch.setattr("lockstep.jobs.kubernetes.policy.GONE_SECONDS", seconds)
