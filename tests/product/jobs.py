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
    """The Kubernetes backend of $KUBECONFIG. `sleep`: what it does between two attempts at a request."""
    load, namespace = _k8s.load_configuration(None)
    api = _k8s.Api(load, timeout, attempts, sleep)
    yield _k8s_backend.KubernetesBackend(api, namespace, interval, lost_after)
    api.close()


def impatient_kubernetes() -> Any:
    """The Kubernetes backend of $KUBECONFIG, which waits a moment where a person's would wait for seconds."""
    load, namespace = _k8s.load_configuration(None)
    api = _k8s.Api(load, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    return _k8s_backend.KubernetesBackend(api, namespace, interval=0.2, lost_after=2)


def on_clock(backend: Any, clock: Any, patch: pytest.MonkeyPatch) -> None:
    """The Kubernetes backend lives by a clock of the test's own, with the patience that it has by itself."""
    backend.interval, backend.lost_after = 10.0, 300.0
    patch.setattr("lockstep.jobs.backend.time", clock)
    patch.setattr("lockstep.jobs.kubernetes.backend.time", clock)


def manifests(name: str, spec: JobSpec) -> tuple[list[dict[str, Any]], str]:
    """What a cluster's backend makes of a job: the objects, and the text that `render` prints."""
    objects = _backend.backend_of(name).manifests(spec)
    return objects, _manifest.to_yaml(objects)


def findings(name: str, spec: JobSpec, objects: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What the rules of a cluster's backend find in a job, or in other objects for it: id → finding."""
    rules = _backend.backend_of(name).rules
    spec, _ = _snapshots.resolve(spec)
    given = manifests(name, spec)[0] if objects is None else objects
    return {item.id: item for item in rules.apply(spec, given)}


def rules(name: str) -> set[str]:
    """The ids of those rules."""
    return {rule.id for rule in _backend.backend_of(name).rules.all()}


def files_of_code(packed: bytes, identity: str) -> set[str]:
    """The paths in an archive of code. Raises where it is damaged, or another one than that of the identity."""
    return {file.path for file in _archive.read(packed, identity)}


PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
"""`python -c PROGRAM WORDS` is `lockstep WORDS` as a separate process."""


def local(folder: Path, bare: bool = True) -> Any:
    """The local backend with its records in `folder`. A bare one runs a job's command itself, where a launcher takes
    seconds to begin."""
    backend = Inside("jobs.local.backend").LocalBackend

    class Bare(backend):  # type: ignore[misc, valid-type]
        @staticmethod
        def _command(spec: JobSpec, run_dir: str) -> list[str]:
            return [sys.executable if word == "python" else word for word in spec.command or ()]

    return Bare(folder) if bare else backend(folder)


def travels(folder: Path) -> dict[str, bytes]:
    """The files of a folder that travel with a job, and what they hold. Raises `UserError`."""
    return {file.path: file.data for file in _snapshots.collect(folder).files}


def code_of(folder: Path) -> tuple[str, bytes]:
    """Identity and archive of the code in a folder."""
    found = _snapshots.collect(folder)
    return found.identity, found.packed


def pinned(spec: JobSpec) -> JobSpec:
    """The spec with the identity of its code in place of the folder; nothing is kept."""
    return _snapshots.resolve(spec)[0]


def kept(*specs: JobSpec) -> list[JobSpec]:
    """The specs as they are submitted, with their code kept in $LOCKSTEP_HOME."""
    return _snapshots.snapshot_all(list(specs))


def lower_limits_of_code(patch: pytest.MonkeyPatch) -> None:
    """30 files: what is above them need not be made in full."""
    patch.setattr("lockstep.jobs.snapshots.MAX_FILES", 30)


def composed(spec: JobSpec, prepare: bool = False) -> dict[str, Any]:
    """The Compose file of a job, or of the container that makes its shards."""
    return (_compose.render_prepare if prepare else _compose.render)(spec)


def manifest(file: dict[str, Any]) -> str:
    """As `lockstep render` prints it."""
    return _manifest.to_yaml([file])


def lint_of_compose(spec: JobSpec) -> list[Any]:
    """The findings (`id`, `level`, `message`) about the Compose file of a job."""
    return list(_compose.RULES.apply(spec, [composed(spec)]))


def words_of_rank(spec: JobSpec, *more: str) -> list[str]:
    """The command of a rank, in `/runs/x`."""
    return _model.rank_command(spec, "/runs/x", *more)


def short_grace(patch: pytest.MonkeyPatch) -> None:
    """A local job that does not end after its grace is killed soon, and soon reported as still alive."""
    patch.setattr("lockstep.jobs.local.backend.GRACE_MARGIN", -3)
    patch.setattr("lockstep.jobs.local.supervise.KILL_SECONDS", 2)


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The local backend as on another machine that shares the home folder: no process number means anything there."""
    patch.setattr("lockstep.jobs.local.backend.here", lambda: "other pid:[1]")
    patch.setattr("lockstep.jobs.local.backend.alive", lambda pid, ticks: False)


def slurm_script(spec: JobSpec, folder: Path, after: str | None = None, elements: int = 1) -> str:
    """The sbatch script of a job, or of an array with these elements."""
    (sent,) = Inside("jobs.slurm.render").manifests(spec, folder, after, elements)
    return str(sent["script"])


def slurm_log(folder: Path, job_id: str) -> Iterator[str]:
    """The lines of the first node of a SLURM job that has ended, from the folder with its logs."""
    return iter(Inside("jobs.logs").follow({0: folder / f"{job_id}_0_log.out"}, 0, False, lambda: True, 0.1, None))


def break_off_after_code(patch: pytest.MonkeyPatch) -> None:
    """Submissions to Compose are killed when their code is there, and before the first container is."""
    patch.setattr(_backend.backend_of("compose"), "_up", lambda self, job: self._bring_code(job.spec))


def slurm(lost_after: float = 300.0) -> Any:
    """A backend that asks SLURM three times a second."""
    found = Inside("jobs.slurm.backend").SlurmBackend()
    found.interval, found.lost_after = 0.3, lost_after
    return found


def slurm_states() -> tuple[str, ...]:
    """SLURM's names of the states in which a job has ended, as we know them."""
    return tuple(Inside("jobs.slurm.observe").FINAL)
