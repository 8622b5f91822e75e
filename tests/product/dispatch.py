"""Backends as objects, and how jobs and their code are rendered."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.product.names import JobSpec, backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest


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


def inside_a_pod(namespace_file: Path, patch: pytest.MonkeyPatch) -> None:
    """As in a pod, which was given this file with its namespace."""
    patch.setattr("lockstep.jobs.kubernetes.api.NAMESPACE_FILE", namespace_file)


def namespace() -> str:
    """The one that commands take without --context."""
    from lockstep.jobs.kubernetes.api import load_configuration

    return load_configuration(None)[1]


def on_clock(backend: Any, clock: Any, patch: pytest.MonkeyPatch) -> None:
    """The Kubernetes backend lives by a clock of the test's own, with the patience that it has by itself."""
    backend.interval, backend.lost_after = 10.0, 300.0
    patch.setattr("lockstep.jobs.backend.time", clock)
    patch.setattr("lockstep.jobs.kubernetes.backend.time", clock)


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
    from lockstep.wire import archive

    return {file.path for file in archive.read(packed, identity)}


def execute(job_backend: Any, name: str, command: list[str], rank: int, streams: tuple[Any, Any, Any]) -> int:
    """`lockstep exec` with these three files for its streams: the exit code."""
    from lockstep.jobs.process import Streams

    code: int = job_backend.execute(name, command, rank, Streams(*(stream.fileno() for stream in streams)))
    return code


def ping_every(seconds: float, patch: pytest.MonkeyPatch) -> None:
    """How often a quiet connection to a pod is kept alive."""
    patch.setattr("lockstep.jobs.kubernetes.exec.PING_SECONDS", seconds)


PROGRAM = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
"""`python -c PROGRAM WORDS` is `lockstep WORDS` as a process of its own."""


def command_line() -> None:
    """What the program `lockstep` runs. Ends with SystemExit."""
    from lockstep.jobs.cli.main import main

    main()


def local(folder: Path, bare: bool = True) -> Any:
    """The local backend with its records in `folder`. A bare one runs a job's command itself, where a launcher takes
    seconds to begin."""
    from lockstep.jobs.local.backend import LocalBackend

    class Bare(LocalBackend):
        @staticmethod
        def _command(spec: JobSpec, run_dir: str) -> list[str]:
            return [sys.executable if word == "python" else word for word in spec.command or ()]

    return Bare(folder) if bare else LocalBackend(folder)


def impatient_kubernetes() -> Any:
    """The Kubernetes backend of $KUBECONFIG, which waits a moment where a person's would wait for seconds."""
    from lockstep.jobs.kubernetes.api import Api, load_configuration
    from lockstep.jobs.kubernetes.backend import KubernetesBackend

    load, namespace = load_configuration(None)
    api = Api(load, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    return KubernetesBackend(api, namespace, interval=0.2, lost_after=2)


def streams(stdin: int, stdout: int, stderr: int) -> Any:
    """Descriptors for a backend's `execute`."""
    from lockstep.jobs.process import Streams

    return Streams(stdin, stdout, stderr)


def travels(folder: Path, *allow: str) -> dict[str, bytes]:
    """The files of a folder that travel with a job, and what they hold. Raises `UserError`."""
    from lockstep.jobs.code.collect import collect

    return {file.path: file.data for file in collect(folder, allow).files}


def code_of(folder: Path) -> tuple[str, bytes]:
    """Identity and archive of the code in a folder."""
    from lockstep.jobs.code.collect import collect

    found = collect(folder)
    return found.identity, found.packed


def pinned(spec: JobSpec) -> JobSpec:
    """The spec with the identity of its code in place of the folder; nothing is kept."""
    from lockstep.jobs.code import store

    return store.pinned(spec)[0]


def kept(*specs: JobSpec) -> list[JobSpec]:
    """The specs as they are submitted, with their code kept in $LOCKSTEP_HOME."""
    from lockstep.jobs.code import store

    return store.all_kept(list(specs))


def copy_of_code(identity: str) -> Path:
    """The folder that local jobs run kept code in."""
    from lockstep.jobs.code import store

    return store.unpacked(identity)


def lower_limits_of_code(patch: pytest.MonkeyPatch) -> None:
    """30 files, 5 repositories, a second for patterns and for git: what is above them need not be made in full."""
    from lockstep.jobs.code import listing, repository

    for module, name, value in (
        (listing, "MAX_FILES", 30), (listing, "_MAX_REPOSITORIES", 5), (listing, "_PATTERN_SECONDS", 1), (repository, "_SECONDS", 1),
    ):  # fmt: skip
        patch.setattr(module, name, value)


def composed(spec: JobSpec, prepare: bool = False) -> dict[str, Any]:
    """The Compose file of a job, or of the container that makes its shards."""
    from lockstep.jobs.compose import render

    file: dict[str, Any] = (render.render_prepare if prepare else render.render)(spec)
    return file


def manifest(file: dict[str, Any]) -> str:
    """As `lockstep render` prints it."""
    from lockstep.jobs.manifest import to_yaml

    return str(to_yaml([file]))


def lint_of_compose(spec: JobSpec) -> list[Any]:
    """The findings (`id`, `level`, `message`) about the Compose file of a job."""
    from lockstep.jobs.compose.rules import RULES

    return list(RULES.apply(spec, [composed(spec)]))


def words_of_rank(spec: JobSpec, *more: str) -> list[str]:
    """The command of a rank, in `/runs/x`."""
    from lockstep.jobs import command

    return command.rank(spec, "/runs/x", *more)


def short_grace(patch: pytest.MonkeyPatch) -> None:
    """A local job that does not end after its grace is killed soon, and soon said to live still."""
    from lockstep.jobs import command
    from lockstep.jobs.local import processes

    patch.setattr(command, "GRACE_MARGIN", -3)
    patch.setattr(processes, "KILL_SECONDS", 2)


def living(job: str) -> list[int]:
    """Processes of this machine that belong to a submission of a local job."""
    from lockstep.jobs.local import processes

    return list(processes.living(job))


def elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The local backend as on another machine that shares the home folder: no process number means anything there."""
    from lockstep.jobs.local import backend as module

    patch.setattr(module, "here", lambda: "other pid:[1]")
    patch.setattr(module, "alive", lambda pid, ticks: False)
    patch.setattr(module, "living", lambda job, looks: [])


def slurm_log(folder: Path, job_id: str) -> Iterator[str]:
    """The lines of the first node of a SLURM job that has ended, from the folder with its logs."""
    from lockstep.jobs.slurm import submission

    record = {"submitit": str(folder), "job_id": job_id}
    return iter(submission.lines(record, [0], False, lambda: True, 0.1))


def slurm_task(spec: JobSpec) -> Any:
    """What submitit hands to the tasks of a training."""
    from lockstep.jobs.slurm.render import training_task

    return training_task(spec)


def slurm_python(spec: JobSpec, folder: Path) -> list[str]:
    """The words by which srun starts Python on a node."""
    from lockstep.jobs.slurm import render

    return shlex.split(render.python(spec, folder, render.Place.of_this_machine()))


def break_off_after_code(patch: pytest.MonkeyPatch) -> None:
    """Submissions to Compose are killed when their code is there, and before the first container is."""
    patch.setattr(backend("compose"), "_up", lambda self, job: self._bring_code(job.spec))


def look_late(backend: Any, busy: Callable[[Path, Callable[[Path], bool]], None]) -> None:
    """`busy(folder, lives)` is called before the local backend looks whether processes of a job live."""
    lives = type(backend)._supervised

    def late(folder: Path) -> bool:
        busy(folder, lives)
        return bool(lives(folder))

    backend._supervised = late


def slurm(over_ssh: str | None = None, lost_after: float = 300.0) -> Any:
    """A backend that asks SLURM three times a second, here or over ssh."""
    from lockstep.jobs.slurm.backend import SlurmBackend

    found = SlurmBackend.connect(host=over_ssh)
    found.interval, found.lost_after = 0.3, lost_after
    return found


def slurm_script(spec: JobSpec, folder: Path, after: str | None = None, parts: int = 1) -> str:
    """The batch script of a job, or of an array of so many parts, that starts when the job `after` has ended."""
    from lockstep.jobs.slurm import render

    return str(render.script(spec, folder, after, parts))


def slurm_states() -> tuple[str, ...]:
    """SLURM's names of the states in which a job has ended, as we know them."""
    from lockstep.jobs.slurm.observe import FINAL

    return tuple(FINAL)


def sweep(spec: JobSpec, values: dict[str, list[Any]]) -> list[JobSpec]:
    """The jobs of a sweep."""
    from lockstep.jobs import sweep as sweeps

    return list(sweeps.expand(spec, values))


def kept_code(identity: str) -> Path:
    """The folder that holds the copy of a job's code which a cluster's nodes run."""
    from lockstep.jobs.code import store

    return store.folder(identity)
