"""Backends as objects, and how jobs and their code are rendered."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.product.inside import Inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

    from lockstep import JobSpec

_archive = Inside("wire.archive")
_backend = Inside("jobs.backend")
_model = Inside("jobs.spec.model")
_compose = Inside("jobs.compose.render")
_k8s = Inside("jobs.kubernetes.api")
_k8s_backend = Inside("jobs.kubernetes.backend")
_manifest = Inside("jobs.manifest")
_snapshots = Inside("jobs.snapshots")


@contextlib.contextmanager
def kubernetes(
    interval: float = 0.2, lost_after: float = 1.0, timeout: float = 5.0, attempts: int = 5,
    sleep: Callable[[float], None] = lambda seconds: None,
) -> Iterator[Any]:  # fmt: skip
    """Yields the Kubernetes backend of $KUBECONFIG. It calls `sleep` between two attempts at a request."""
    load, namespace = _k8s.load_configuration(None)
    api = _k8s.Api(load, timeout, attempts, sleep)
    yield _k8s_backend.KubernetesBackend(api, namespace, interval, lost_after)
    api.close()


def impatient_kubernetes() -> Any:
    """Returns the Kubernetes backend of $KUBECONFIG, with pauses of at most 0.1 s."""
    load, namespace = _k8s.load_configuration(None)
    api = _k8s.Api(load, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    return _k8s_backend.KubernetesBackend(api, namespace, interval=0.2, lost_after=2)


def on_clock(backend: Any, clock: Any, patch: pytest.MonkeyPatch) -> None:
    """Gives the Kubernetes backend the test's clock, and its default waiting times."""
    backend.interval, backend.lost_after = 10.0, 300.0
    patch.setattr("lockstep.jobs.backend.time", clock)
    patch.setattr("lockstep.jobs.kubernetes.backend.time", clock)


def manifests(name: str, spec: JobSpec) -> tuple[list[dict[str, Any]], str]:
    """Returns the objects that a cluster's backend makes of a job, and the text that `render` prints."""
    objects = _backend.backend_of(name).manifests(spec)
    return objects, _manifest.to_yaml(objects)


def findings(name: str, spec: JobSpec, objects: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Applies the rules of a cluster's backend to a job, or to other objects for it: id → finding."""
    rules = _backend.backend_of(name).rules
    spec, _ = _snapshots.resolve(spec)
    targets = manifests(name, spec)[0] if objects is None else objects
    return {item.id: item for item in rules.apply(spec, targets)}


def rules(name: str) -> set[str]:
    """Returns the ids of its rules."""
    return {rule.id for rule in _backend.backend_of(name).rules.all()}


def files_of_code(packed: bytes, identity: str) -> set[str]:
    """Returns the paths in an archive of code. Raises if it is damaged or has another identity."""
    return {file.path for file in _archive.read(packed, identity)}


PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
"""`python -c PROGRAM WORDS` is `lockstep WORDS` as a separate process."""


def local(folder: Path, bare: bool = True) -> Any:
    """Returns the local backend with its records in `folder`. A bare backend runs a job's command without the slow
    launcher."""
    backend = Inside("jobs.local.backend").LocalBackend

    class Bare(backend):  # type: ignore[misc, valid-type]
        @staticmethod
        def _command(spec: JobSpec, run_dir: str) -> list[str]:
            return [sys.executable if word == "python" else word for word in spec.command or ()]

    return Bare(folder) if bare else backend(folder)


def travels(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder that travel with a job: path → content. Raises `UserError`."""
    return {file.path: file.data for file in _snapshots.collect(folder).files}


def code_of(folder: Path) -> tuple[str, bytes]:
    """Returns identity and archive of the code in a folder."""
    snapshot = _snapshots.collect(folder)
    return snapshot.identity, snapshot.packed


def pinned(spec: JobSpec) -> JobSpec:
    """Returns the spec with the identity of its code in place of the folder; stores nothing."""
    return _snapshots.resolve(spec)[0]


def kept(*specs: JobSpec) -> list[JobSpec]:
    """Stores the specs' code in $LOCKSTEP_HOME. Returns the specs as submitted."""
    return _snapshots.snapshot_all(list(specs))


def lower_limits_of_code(patch: pytest.MonkeyPatch) -> None:
    """Lowers the limit to 30 files, so that tests exceed it quickly."""
    patch.setattr("lockstep.jobs.snapshots.MAX_FILES", 30)


def composed(spec: JobSpec, prepare: bool = False) -> dict[str, Any]:
    """Returns the Compose file of a job, or of the job that makes its shards."""
    return _compose.render(_backend.backend_of("compose").preparation(spec) if prepare else spec)


def manifest(file: dict[str, Any]) -> str:
    """Returns what `lockstep render` prints."""
    return _manifest.to_yaml([file])


def lint_of_compose(spec: JobSpec) -> list[Any]:
    """Returns the findings (`id`, `level`, `message`) about the Compose file of a job."""
    return list(_compose.RULES.apply(spec, [composed(spec)]))


def words_of_rank(spec: JobSpec, *more: str) -> list[str]:
    """Returns the command of a rank, in `/runs/x`."""
    return _model.rank_command(spec, "/runs/x", *more)


def short_grace(patch: pytest.MonkeyPatch) -> None:
    """The local backend soon kills a job that outlives its grace, and soon reports it as still alive."""
    patch.setattr("lockstep.jobs.local.backend.GRACE_MARGIN", -3)
    patch.setattr("lockstep.jobs.local.supervise.KILL_SECONDS", 2)


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The local backend acts as on another machine with the same home folder: process ids mean nothing there."""
    patch.setattr("lockstep.jobs.local.backend.here", lambda: "other pid:[1]")
    patch.setattr("lockstep.jobs.local.backend.alive", lambda pid, ticks: False)


def slurm_script(spec: JobSpec, folder: Path, after: str | None = None, elements: int = 1) -> str:
    """Returns the sbatch script of a job, or of an array with these elements."""
    (item,) = Inside("jobs.slurm.render").manifests(spec, folder, after, elements)
    return str(item["script"])


def slurm_log(folder: Path, job_id: str) -> Iterator[str]:
    """Yields the lines of the first node of a SLURM job that has ended, from the folder with its logs."""
    return iter(Inside("jobs.logs").follow({0: folder / f"{job_id}_0_log.out"}, 0, False, lambda: True, 0.1, None))


def break_off_after_code(patch: pytest.MonkeyPatch) -> None:
    """Stops submissions to Compose when their code is there, before the first container starts."""
    patch.setattr(_backend.backend_of("compose"), "_up", lambda self, job: self._bring_code(job.spec))


def slurm(lost_after: float = 300.0) -> Any:
    """Returns a backend that asks SLURM three times a second."""
    backend = Inside("jobs.slurm.backend").SlurmBackend()
    backend.interval, backend.lost_after = 0.3, lost_after
    return backend


def slurm_states() -> tuple[str, ...]:
    """Returns SLURM's names of the states in which a job has ended."""
    return tuple(Inside("jobs.slurm.observe").FINAL)
