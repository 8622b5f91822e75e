"""The one module of the tests that reaches inside the product.

Tests come from outside: the command line with `--json`, the files that users see, and names that users import (`PUBLIC`).
What none of these gives – a checkpoint's tensors, the names of all strategies, a backend as an object – they take from
here. So a module that moves costs its own unit tests in `tests/unit/`, and lines of this file. What needs torch is
imported by the function that uses it: the dispatcher's tests run without.
"""

from __future__ import annotations

import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

from lockstep import JobSpec
from lockstep.jobs.status import Status, Unreachable
from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


# Jobs on this machine, the code that travels with them, and files for Compose (tests/jobs, tests/containers)


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


def kubernetes() -> Any:
    """The Kubernetes backend of $KUBECONFIG, which waits a moment where a person's would wait for seconds."""
    from lockstep.jobs.kubernetes.api import Api, load_configuration
    from lockstep.jobs.kubernetes.backend import KubernetesBackend

    load, namespace = load_configuration(None)
    api = Api(load, sleep=lambda seconds: time.sleep(min(seconds, 0.1)))
    return KubernetesBackend(api, namespace, interval=0.2, lost_after=2)


def streams(stdin: int, stdout: int, stderr: int) -> Any:
    """Descriptors for a backend's `execute`."""
    from lockstep.jobs.foreground import Streams

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
    from lockstep.jobs.code import pin

    return pin.look(spec)[0]


def kept(*specs: JobSpec) -> list[JobSpec]:
    """The specs as they are submitted, with their code kept in $LOCKSTEP_HOME."""
    from lockstep.jobs.code import pin

    return pin.keep_all(list(specs))


def copy_of_code(identity: str) -> Path:
    """The folder that local jobs run kept code in."""
    from lockstep.jobs.code import store

    return store.unpacked(identity)


def lower_limits_of_code(patch: pytest.MonkeyPatch) -> None:
    """30 files, 5 repositories, a second for patterns and for git: what is above them need not be made in full."""
    from lockstep.jobs.code import listing, patterns, repository

    for module, name, value in (
        (listing, "MAX_FILES", 30), (listing, "_MAX_REPOSITORIES", 5), (patterns, "SECONDS", 1), (repository, "_SECONDS", 1),
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
    from lockstep.jobs.slurm import logs
    from lockstep.jobs.slurm.transport.local import LOCAL

    record = {"submitit": str(folder), "job_id": job_id}
    return iter(logs.lines(LOCAL, record, [0], False, lambda: True, 0.1, 0))


def slurm_task(spec: JobSpec) -> Any:
    """What submitit hands to the tasks of a training."""
    from lockstep.jobs.slurm.backend import training_task

    return training_task(spec)


def slurm_python(spec: JobSpec, folder: Path) -> list[str]:
    """The words by which srun starts Python on a node."""
    from lockstep.jobs.slurm import render
    from lockstep.jobs.slurm.transport.local import LOCAL

    return shlex.split(render.python(spec, folder, LOCAL.place()))


def break_off_after_code(patch: pytest.MonkeyPatch) -> None:
    """Submissions to Compose are killed when their code is there, and before the first container is."""
    patch.setattr(backend("compose"), "_up", lambda self, spec: self._bring_code(spec))


def followed_containers(*ids: str) -> Iterator[str]:
    """The lines of the containers of a Compose job, followed."""
    made: Any = backend("compose")
    return iter(made(interval=0.01)._lines("small", dict.fromkeys(ids, ""), None, follow=True))


def look_late(backend: Any, busy: Callable[[Path, Callable[[Path], bool]], None]) -> None:
    """`busy(folder, lives)` is called before the local backend looks whether processes of a job live."""
    lives = type(backend)._supervised

    def late(folder: Path) -> bool:
        busy(folder, lives)
        return bool(lives(folder))

    backend._supervised = late
