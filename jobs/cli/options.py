"""The options that several commands share, and the JobSpec they make together with job.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
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
NameFlag = Annotated[str | None, typer.Option("--name", help="Name of the job.")]
Recipe = Annotated[str | None, typer.Option(help="A recipe of training.")]
Image = Annotated[str | None, typer.Option(help="Container image.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs per node.")]
Profile = Annotated[str | None, typer.Option(help="Cluster profile: a name, or a YAML file (docs/slurm.md).")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=A,B,…",
        help="One run for each value: a job array on SLURM, separate jobs elsewhere. Repeat the option for a grid.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Any setting of the job: memory=32Gi, k8s.queue=gpu, overrides.epochs=4."
    ),
]


def parse(sets: list[str] | None, **flags: Any) -> dict[str, Any]:
    """Flags and `--set` texts as dotted name → value. Raises `UserError`."""
    from lockstep.jobs.spec.model import JobSpec
    from lockstep.training.config import settings

    given = {name: value for name, value in flags.items() if value is not None}
    return {**given, **dict(settings.assignments(JobSpec, sets or []))}


def build(file: Path | None, values: dict[str, Any], profile: str | None = None) -> JobSpec:
    """The spec of a file with `values` in it, or of `values` alone; a profile lies below both. Raises `UserError`."""
    from lockstep.jobs.spec import profile as profiles
    from lockstep.jobs.spec.file import place
    from lockstep.jobs.spec.model import JobSpec

    below = profiles.load(profile) if profile is not None else {}
    if file is not None:
        return JobSpec.load(file, values, below)
    plain: dict[str, Any] = below
    for name, value in values.items():
        place(plain, name, value)
    if "recipe" in plain and "name" not in plain and isinstance(plain["recipe"], str):
        plain["name"] = Path(plain["recipe"]).stem.replace("_", "-").lower()
    return JobSpec.of(plain, "the flags")


def flags(backend: str, **given: str | None) -> dict[str, str | None]:
    """What `--namespace` and `--context` set in the job. Raises `UserError` where they belong to another backend."""
    from lockstep.jobs import connect, registry

    found = registry.backend(backend)
    connect.where(found, None, **given)
    return {found.places[flag]: value for flag, value in given.items() if flag in found.places}
