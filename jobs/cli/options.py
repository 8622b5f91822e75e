"""The options that several commands share, and the JobSpec they make together with job.yaml."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from lockstep.training.contract import UserError

if TYPE_CHECKING:
    from lockstep.jobs.backend import Backend as JobBackend
    from lockstep.jobs.backend import Cluster
    from lockstep.jobs.spec.model import JobSpec

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="local, k8s, slurm or compose.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]
File = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="A job file. Without one, the options describe the job.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value with stable fields.")]
Namespace = Annotated[str | None, typer.Option(help="Kubernetes namespace.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
Host = Annotated[str | None, typer.Option(help="Login node of a SLURM cluster, over ssh: slurm.host.")]
Image = Annotated[str | None, typer.Option(help="Container image.")]
Profile = Annotated[str | None, typer.Option(help="Cluster profile: a name, or a YAML file (docs/slurm.md).")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=A,B,…",
        help="One run for each value: a job array on SLURM, separate jobs elsewhere. Repeat the option for a grid.",
    ),
]


@dataclasses.dataclass
class Place:
    """The options that say where a cluster is."""

    namespace: Namespace = None
    context: Context = None
    host: Host = None

    def open(self, backend: str) -> JobBackend:
        """The backend, ready for questions. Raises `UserError`."""
        from lockstep.jobs.registry import backend as named  # and pydantic with it: `--help` does without

        found = named(backend)
        check_flags(found, vars(self))
        return found.at(None, **vars(self))


@dataclasses.dataclass
class Job:
    """The options that describe a job, beside a job file or without one."""

    file: File = None
    name: Annotated[str | None, typer.Option("--name", help="Name of the job.")] = None
    recipe: Annotated[str | None, typer.Option(help="A recipe of training.")] = None
    image: Image = None
    nodes: Annotated[int | None, typer.Option(help="Nodes.")] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs per node.")] = None
    namespace: Namespace = None
    context: Context = None
    host: Host = None
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any setting of the job: memory=32Gi, k8s.queue=gpu, overrides.epochs=4.",
        ),
    ] = None
    profile: Profile = None

    def spec(self, backend: str | None, **more: Any) -> JobSpec:
        """The spec of the file with the options in it, or of the options alone; a profile lies below both.

        Args:
            backend: whose flags `--namespace`, `--context` and `--host` may be.
            more: further settings; those that are None do not count.

        Raises:
            UserError: a flag of another backend, or what is no job.
        """
        from lockstep.jobs import registry
        from lockstep.jobs.spec import profile as profiles
        from lockstep.jobs.spec.model import JobSpec, place
        from lockstep.training.config import settings

        flags = {"namespace": self.namespace, "context": self.context, "host": self.host}
        if backend is not None:
            found = registry.backend(backend)
            check_flags(found, flags)
            more |= {found.places[flag]: value for flag, value in flags.items() if flag in found.places}
        elif given := [flag for flag, value in flags.items() if value is not None]:
            raise UserError(f"--{given[0]} is for one backend: say which, with --backend")
        named = {name: getattr(self, name) for name in ("name", "recipe", "image", "nodes", "gpus")}
        values = {name: value for name, value in {**named, **more}.items() if value is not None}
        values |= dict(settings.assignments(JobSpec, self.sets or []))
        below = profiles.load(self.profile) if self.profile is not None else {}
        if self.file is not None:
            return JobSpec.load(self.file, values, below)
        plain: dict[str, Any] = below
        for name, value in values.items():
            place(plain, name, value)
        if "recipe" in plain and "name" not in plain and isinstance(plain["recipe"], str):
            plain["name"] = Path(plain["recipe"]).stem.replace("_", "-").lower()
        return JobSpec.of(plain, "the flags")


def check_flags(found: type[JobBackend], flags: Mapping[str, str | None]) -> None:
    """Raises `UserError` for a flag that says where another backend's cluster is."""
    from lockstep.jobs import registry

    for flag in (name for name, value in flags.items() if value is not None and name not in found.places):
        owner = next(other for name in registry.packages() if flag in (other := registry.backend(name)).places)
        owned = " and ".join(f"--{name}" for name in owner.places)
        verb = "is" if len(owner.places) == 1 else "are"
        raise UserError(f"{owned} {verb} for {owner.name}, not for {found.name}")


def cluster(name: str, command: str) -> type[Cluster]:
    """A backend that renders. Raises `UserError` where `command` has nothing to do for it."""
    from lockstep.jobs import registry
    from lockstep.jobs.backend import Cluster

    found = registry.backend(name)
    if not issubclass(found, Cluster):
        others = [other for other in registry.packages() if issubclass(registry.backend(other), Cluster)]
        raise UserError(f"{command} knows {', '.join(others[:-1])} and {others[-1]}, got {name!r}")
    return found


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: in place of a `Job` or a `Place` it has the options that these are made of."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Callable[..., Any]] = {name: kind for name, kind in hints.items() if kind in (Job, Place)}
    fields = {name: get_type_hints(kind, include_extras=True) for name, kind in groups.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field: given.pop(field) for field in fields[name]})
        command(**given)

    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        one = parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name])
        each = [one.replace(name=field, annotation=kind, default=None) for field, kind in fields.get(name, {}).items()]
        parameters += each or [one]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run
