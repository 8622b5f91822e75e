"""`slurm:` in job.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from jobs.spec.section import Section
from jobs.spec.types import (
    AbsolutePath,
    Constraint,
    ContainerImage,
    Device,
    HostList,
    Module,
    Mount,
    ShellLine,
    SshHost,
    Values,
    Word,
)

if TYPE_CHECKING:
    from jobs.spec.model import JobSpec


class Slurm(Section):
    EARLIER: ClassVar = {1: {"wckey": "lockstep"}}

    host: SshHost | None = None
    """Login node that is reached over ssh, as ~/.ssh/config knows it, e.g. `login.example`; paths are then of that side.
    Null: this machine is one of the cluster. No part of what the job is."""
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Constraint | None = None
    reservation: Word | None = None
    licenses: Word | None = None
    exclude: HostList | None = None
    """Nodes not to use, e.g. `gpu[03-05],gpu9`."""
    exclusive: bool = False
    """Use whole nodes: no other job runs on them."""
    gpu_type: Word | None = None
    """Name of the GPUs in the cluster's GRES, e.g. `a100`; null: any."""
    array_parallelism: int = Field(default=256, ge=1, le=100000)
    """Runs of a sweep that may run at the same time."""
    wckey: Word | None = None
    """Workload characterisation key, for clusters that require one. Other clusters refuse jobs that have one."""
    socket_interface: Device | None = None
    """NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    ib_hca: Device | None = None
    """NCCL_IB_HCA."""
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    python: AbsolutePath | None = None
    """Python interpreter on the nodes; null: the one that submits the job, and `python` in a container."""
    modules: list[Module] = Field(default_factory=list, max_length=50)
    """Environment modules to load first."""
    setup: list[ShellLine] = Field(default_factory=list, max_length=100)
    """Shell lines that the batch script runs before the ranks start."""
    container: Literal["pyxis", "apptainer"] | None = None
    """Run the ranks in a container: pyxis/enroot or Apptainer. Null: no container."""
    image: ContainerImage | None = None
    """Image of the container: a name in a registry, or a .sqsh or .sif file; null: `image` of the job."""
    mounts: list[Mount] = Field(default_factory=list, max_length=50)
    """More folders in the container: `/path` or `/path:/inside`. The folders of the run are mounted already."""
    patch: Values = Field(default_factory=dict)
    """More submitit parameters, or options of sbatch."""


SECTION = Slurm


def slurm(spec: JobSpec) -> Slurm:
    """The section of a spec."""
    return spec.section(Slurm)


def without_host(spec: JobSpec) -> JobSpec:
    """The same job, wherever it is submitted from."""
    return (
        spec
        if slurm(spec).host is None
        else spec.model_copy(update={"slurm": slurm(spec).model_copy(update={"host": None})})
    )
