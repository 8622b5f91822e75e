"""`slurm:` in job.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from ..spec.types import (
    AbsolutePath,
    Constraint,
    ContainerImage,
    Device,
    HostList,
    Licenses,
    Module,
    Mount,
    Section,
    ShellLine,
    SshHost,
    Values,
    Word,
)

if TYPE_CHECKING:
    from ..spec.model import JobSpec


VARIABLE = "LOCKSTEP_SLURM_HOST"
"""The login node where no flag, job file or profile names one."""


def _with_python(host: str, about: ValidationInfo) -> str:
    """The host with its Python: who asks it has no other setting at hand."""
    python = about.data.get("python")
    return host if python is None or ":" in host or about.data.get("container") else f"{host}:{python}"


class Slurm(Section):
    PLACE: ClassVar = ("host",)

    partition: Word | None = None
    """Partition to run in (`sbatch --partition`); null: the cluster's default partition."""
    account: Word | None = None
    """Account that the job is charged to (`--account`); null: your default account."""
    qos: Word | None = None
    """Quality of service, which sets priority and limits (`--qos`); null: SLURM's default for the account."""
    constraint: Constraint | None = None
    """Features that the nodes must have (`--constraint`), e.g. `a100&nvlink`; null: any node of the partition."""
    reservation: Word | None = None
    """Reservation whose nodes the job uses (`--reservation`); null: nodes that are not reserved."""
    licenses: Licenses | None = None
    """Licenses that the job waits for, with their number (`--licenses`), e.g. `matlab:2,ansys`; null: none."""
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
    """Network interface of NCCL and gloo (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), e.g. `eth0`; null: they choose."""
    ib_hca: Device | None = None
    """InfiniBand or RoCE adapters that NCCL uses (NCCL_IB_HCA), e.g. `mlx5_0,mlx5_1`; null: it chooses."""
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """How much NCCL logs (NCCL_DEBUG): `INFO` says which network it uses; null: as the cluster has set it."""
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
    host: Annotated[SshHost, AfterValidator(_with_python)] | None = None
    """Login node that is reached over ssh, as ~/.ssh/config knows it, e.g. `login.example`; paths are then of that side. Its
    Python needs Lockstep of the same version: `slurm.python`, or `HOST:/PATH` where the job runs in a container. Null: this
    machine is one of the cluster. A job stays the same job with another host."""


SECTION = Slurm


def slurm(spec: JobSpec) -> Slurm:
    """The section of a spec."""
    return spec.section(Slurm)
