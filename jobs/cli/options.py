"""The options that several commands share, and the JobSpec they make together with job.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.contract import UserError

if TYPE_CHECKING:
    from jobs.backend import Submitted
    from jobs.manifest import Manifest
    from jobs.spec.model import JobSpec

Backend = Annotated[str, typer.Argument(metavar="BACKEND", help="local, k8s, slurm or compose.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]
File = Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A job file; without one the flags are the job.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON value with stable fields.")]
Namespace = Annotated[str | None, typer.Option(help="Kubernetes namespace.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig.")]
NameFlag = Annotated[str | None, typer.Option("--name", help="Name of the job.")]
Recipe = Annotated[str | None, typer.Option(help="A recipe of training.")]
Image = Annotated[str | None, typer.Option(help="Container image.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs a node.")]
Profile = Annotated[str | None, typer.Option(help="Cluster profile: a name, or a YAML file (docs/slurm.md).")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep", metavar="NAME=A,B,…", help="One run for each value (slurm: a job array); repeat for a grid."
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
    from training import settings

    values = {name: value for name, value in flags.items() if value is not None}
    for text in sets or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes NAME=VALUE, got {text!r}")
        values[name] = settings.parse_yaml(value, f"--set {name}")
    return values


def build(file: Path | None, values: dict[str, Any], profile: str | None = None) -> JobSpec:
    """The spec of a file with `values` in it, or of `values` alone; a profile lies below both. Raises `UserError`."""
    from jobs.spec import file as specfile
    from jobs.spec.model import JobSpec

    below: dict[str, Any] = {}
    if profile is not None:
        from jobs.spec import profile as profiles

        below = profiles.load(profile)
    if file is not None:
        return specfile.load(file, values, below)
    plain: dict[str, Any] = below
    for name, value in values.items():
        specfile.place(plain, name, value)
    if "recipe" in plain and "name" not in plain and isinstance(plain["recipe"], str):
        plain["name"] = Path(plain["recipe"]).stem.replace("_", "-").lower()
    return JobSpec.of(plain, "the flags")


def manifests(spec: JobSpec, backend: str, command: str) -> list[Manifest]:
    """What `submit` would hand to the backend. Raises `UserError` where that is no manifest."""
    if backend in ("k8s", "kubernetes"):
        from jobs.kubernetes.render import kubernetes

        return kubernetes(spec)
    if backend == "slurm":
        from jobs.cli import arrays as slurm_commands

        return slurm_commands.manifests(spec)
    if backend == "compose":
        from jobs.compose import render as compose

        return [compose.render(spec)]
    raise no_cluster(command, backend)


def preparation(spec: JobSpec, backend: str) -> tuple[str, object, Callable[[], Submitted]]:
    """What writes the shards before the job: its manifest as text and as plain values, and what submits it."""
    from jobs.manifest import to_yaml

    if backend in ("k8s", "kubernetes"):
        from jobs.kubernetes import preparejob
        from jobs.kubernetes.backend import KubernetesBackend

        def submit() -> Submitted:
            return KubernetesBackend.connect(spec.k8s.namespace, spec.k8s.context).prepare(spec)

        objects = preparejob.render(spec)
        return to_yaml(objects), objects, submit
    if backend == "slurm":
        from jobs.cli.arrays import prepare_script
        from jobs.slurm.backend import SlurmBackend

        script = prepare_script(spec)
        return script, {"script": script}, lambda: SlurmBackend().prepare(spec)
    if backend == "compose":
        from jobs.compose import render as compose
        from jobs.compose.backend import ComposeBackend

        project = [compose.render_prepare(spec)]
        return to_yaml(project), project, lambda: ComposeBackend().prepare(spec)
    raise no_cluster("prepare", backend)


def no_cluster(command: str, backend: str) -> UserError:
    """The error of a command that renders or checks, for a backend that has nothing of the kind."""
    from jobs.registry import NAMES
    from training import settings

    if backend not in NAMES:
        return UserError(f"unknown backend {backend!r}{settings.nearest(backend, NAMES)}")
    return UserError(f"{command} knows k8s, slurm and compose, got {backend!r}")
