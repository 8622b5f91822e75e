"""Rules about a SLURM job: what would end it early, starve it, or keep it from being started again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .. import lint
from ..manifest import Manifest, get
from ..spec.model import JobSpec
from .render import Place

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108 - places that a job should not use
RUN_SECONDS = 60


class Subject(lint.Subject):
    """A batch script and its parameters."""

    @property
    def job(self) -> Manifest:
        return self.objects[0] if self.objects else {}

    @property
    def image(self) -> str | None:
        settings = self.spec.slurm
        return settings.image or self.spec.image if settings.container is not None else None


_PACKAGES = ("opt/venv", "usr", "usr/local", "opt/conda")


def look(spec: JobSpec, place: Place) -> dict[str, str]:
    """What the cluster's files say of a job before it is submitted.

    Returns:
        `no_shards`: the folder that is missing. `no_submitit`: the image without it; "" where all is well or unknown.
    """
    return {
        "no_shards": str(spec.shard_folder) if spec.shards_missing_here else "",
        "no_submitit": _without_submitit(spec, place),
    }


def _without_submitit(spec: JobSpec, place: Place) -> str:
    """An image that is a folder shows what it holds."""
    image = spec.slurm.image or spec.image
    if spec.slurm.container is None or not image:
        return ""
    inside = Path(place.resolve(image))
    found = [path for folder in _PACKAGES for path in inside.glob(f"{folder}/lib/python3*/*-packages")]
    return image if found and not any((path / "submitit").exists() for path in found) else ""


RULES = lint.Rules(Subject)
rule = RULES.rule


def _is_node_local(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in NODE_LOCAL)


@rule("LS102")
def time_to_train(subject: Subject) -> Iterator[str]:
    """The signal comes before the time limit; a limit that is hardly longer leaves no time to train."""
    lead = get(subject.job, "parameters", "slurm_signal_delay_s") or 0
    limit = 60 * int(get(subject.job, "parameters", "timeout_min") or 0)
    # SLURM looks every 30 s, so the signal comes up to so much earlier.
    if limit < lead + 30 + RUN_SECONDS:
        yield (
            f"time_limit {subject.spec.time_limit} leaves {max(0, limit - lead - 30)} s to train: the signal to save comes "
            f"up to {lead + 30} s before the end; raise time_limit, or lower grace_seconds"
        )


@rule("LS103", "warning")
def shared_run(subject: Subject) -> Iterator[str]:
    """A run directory on a node's own disk is gone when the job is started again elsewhere."""
    path = str(get(subject.job, "run_dir"))
    if _is_node_local(path) and subject.spec.checkpoints_bucket is None:
        yield f"run_dir {path} is usually local to a node: choose a folder that all nodes see, or set checkpoint.to to a bucket"


@rule("LS104", "warning")
def shared_folder(subject: Subject) -> Iterator[str]:
    """The nodes read the job's payload and write its logs."""
    output = str(get(subject.job, "parameters", "slurm_additional_parameters", "output"))
    if _is_node_local(output):
        yield f"{PurePosixPath(output).parent} is usually local to a machine: set LOCKSTEP_HOME to a folder that all nodes see"


@rule("LS105", "warning")
def slurm_interface(subject: Subject) -> Iterator[str]:
    """NCCL may choose an interface that the other nodes cannot reach."""
    spec = subject.spec
    if spec.gpus and spec.nodes > 1 and not spec.slurm.socket_interface and "NCCL_SOCKET_IFNAME" not in spec.env:
        yield "NCCL_SOCKET_IFNAME is not set: on nodes with several interfaces set slurm.socket_interface (or --profile)"


@rule("LS108", "warning")
def restarts(subject: Subject) -> Iterator[str]:
    """A preemption or time limit counts where the job has saved nothing new."""
    if subject.spec.max_restarts == 0:
        yield "max_restarts is 0: the first failure ends the job, and so does a preemption before its first checkpoint"


@rule("LS110")
def container_image(subject: Subject) -> Iterator[str]:
    """A container needs an image, and a python that is in it."""
    settings = subject.spec.slurm
    if settings.container is not None and not (settings.image or subject.spec.image):
        yield f"slurm.container is {settings.container}, but there is no image: set slurm.image"


@rule("LS111", "warning")
def image_unused(subject: Subject) -> Iterator[str]:
    """An image is used only where a container runtime is chosen."""
    if subject.spec.slurm.container is None and subject.spec.slurm.image is not None:
        yield "slurm.image is not used: set slurm.container to pyxis or apptainer"


@rule("LS112", "warning")
def unprepared(subject: Subject) -> Iterator[str]:
    """Without prepared shards, every node makes its own copy of the data."""
    folder = get(subject.job, "files", "no_shards")
    if folder:
        yield f"{folder} does not exist: the job makes the shards itself, unless `lockstep prepare slurm` makes them first"


@rule("LS113")
def launcher_variables(subject: Subject) -> Iterator[str]:
    """The ranks' places come from SLURM."""
    taken = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = [name for name in subject.spec.env if name in taken or name.startswith(("SLURM_", "SBATCH_"))]
    if found:
        yield f"env {found[0]} is set by SLURM: remove it"


@rule("LS115")
def image_without_submitit(subject: Subject) -> Iterator[str]:
    """A task in the image is submitit's. What a folder holds shows from here; of a file or a name `doctor` finds out."""
    image = get(subject.job, "files", "no_submitit")
    if image:
        yield f"{image} does not have submitit, which starts the tasks: build it from docker/ of this version, or install submitit in it"
