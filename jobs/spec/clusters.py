"""`k8s:`, `slurm:` and `compose:` in job.yaml: the settings of one backend each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from .types import (
    AbsolutePath,
    Constraint,
    ContainerImage,
    Device,
    Duration,
    HostList,
    Label,
    LabelKey,
    LabelValue,
    Licenses,
    Module,
    Mount,
    Resource,
    Section,
    ShellLine,
    Size,
    SshHost,
    Subdomain,
    Text,
    Values,
    Word,
)

PLACES: dict[str, tuple[str, ...]] = {"k8s": ("namespace", "context"), "slurm": ("host",), "compose": ()}
"""The sections, each with the settings that say where a job goes. Those are no part of what the job is."""
RESERVED_MARKS = ("lockstep/", "app.kubernetes.io/managed-by", "container.apparmor.", "prometheus.io/")
"""Begins of labels and annotations that a job's pods get from nobody else."""


class Toleration(Section):
    key: LabelKey | None = None
    """Key of the taint; null, with `Exists`: every taint."""
    operator: Literal["Exists", "Equal"] = "Exists"
    """`Exists`: a taint with this key, whatever its value. `Equal`: one that also has this `value`."""
    value: LabelValue | None = None
    """Value of the taint, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null: every effect."""

    @model_validator(mode="after")
    def _meaningful(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("operator Exists takes no value: leave it out, or use Equal")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("operator Equal needs a key")
        return self


def _free(key: str) -> str:
    if key.startswith(RESERVED_MARKS):
        raise ValueError(f"{key} is Lockstep's own, or opens what a patch may not open either: leave it out")
    return key


Mark = Annotated[LabelKey, AfterValidator(_free)]


class Kubernetes(Section):
    kind: Literal["PyTorchJob", "TrainJob", "auto"] = "auto"
    """Which custom resource to submit: training-operator v1 or Kubeflow Trainer v2 (2.3 or later). `auto`: the one that the cluster
    has, TrainJob where it has both and can say all of the job; PyTorchJob where no cluster is asked (render, lint)."""
    namespace: Label | None = None
    """Namespace; null: the one in the kubeconfig."""
    context: Text | None = Field(default=None, min_length=1, max_length=253)
    """Context of the kubeconfig; null: the current one."""
    runtime: Subdomain = "torch-distributed"
    """ClusterTrainingRuntime that a TrainJob refers to."""
    queue: Label | None = None
    """Kueue LocalQueue."""
    topology: Literal["required", "preferred"] | None = None
    """Kueue topology-aware scheduling: the whole job within one `topology_level`, or as near as possible."""
    topology_level: LabelKey = "cloud.provider.com/topology-rack"
    """Node label of the level that `topology` refers to."""
    priority_class: Subdomain | None = None
    """PriorityClass of a PyTorchJob's pods: which pods are scheduled first, and which may be evicted for others. Null: the
    cluster's default."""
    scheduler_name: Subdomain | None = None
    """Scheduler of a PyTorchJob's pods, e.g. `volcano`. Null: the cluster's default."""
    pod_labels: dict[Mark, LabelValue] = Field(default_factory=dict, max_length=50)
    """Further labels of the pods."""
    pod_annotations: dict[Mark, Text] = Field(default_factory=dict, max_length=50)
    """Further annotations of the pods. Unless these say otherwise, the pods ask autoscalers to leave them where they are
    (`karpenter.sh/do-not-disrupt`, `cluster-autoscaler.kubernetes.io/safe-to-evict`): all ranks would start again with one
    of them."""
    service_account: Subdomain | None = None
    """ServiceAccount of the pods; its token is not mounted. Null: the namespace's `default`."""
    image_pull_secrets: list[Subdomain] = Field(default_factory=list, max_length=20)
    """Secrets with the credentials of private registries, from the job's namespace. Empty: those of the ServiceAccount."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When a node pulls the image of a PyTorchJob: if it does not have it, at every start, or never (it was loaded onto the
    node by hand)."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Labels that a node must have, e.g. `{example.com/pool: a100}`. Empty: any node."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=50)
    """Taints of nodes on which the pods may still run. Empty: none but those that the cluster adds to every pod."""
    spread: Literal["required", "preferred", "none"] = "required"
    """One pod per host: always, if possible, or not required. With `none`, two nodes of a job may share a machine."""
    gpu_resource: Resource = "nvidia.com/gpu"
    """Resource that a GPU is requested as: the name that the cluster's device plugin gives it."""
    rdma: dict[Resource, Annotated[int, Field(ge=1, le=64)]] = Field(default_factory=dict)
    """RDMA devices per node, e.g. `{rdma/hca_shared: 1}` or `{vpc.amazonaws.com/efa: 4}`."""
    hugepages: Size | None = None
    """hugepages-2Mi per node; EFA needs 5120Mi."""
    socket_interface: Device | None = None
    """Network interface of NCCL and gloo (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), e.g. `eth0`; null: they choose."""
    ib_hca: Device | None = None
    """InfiniBand or RoCE adapters that NCCL uses (NCCL_IB_HCA), e.g. `mlx5_0,mlx5_1`; null: it chooses."""
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] = "WARN"
    """How much NCCL logs (NCCL_DEBUG), where the job has GPUs: `WARN`, errors only; `INFO`, also which network it uses."""
    run_as_user: int | None = Field(default=1000, ge=1, le=2**31 - 1)
    """User id of the container, not root. Null: the cluster assigns one (OpenShift, from the namespace's range)."""
    fs_group: int | None = Field(default=1000, ge=1, le=2**31 - 1)
    """Group that owns the files of the volumes. Null: the cluster assigns one."""
    prometheus_namespace: Label = "monitoring"
    """Namespace whose pods may scrape the metrics ports."""
    ttl: Duration = "7d"
    """How long a finished job stays before the cluster deletes it."""
    patch: Values = Field(default_factory=dict)
    """Patch on the rendered job, for fields that have no setting here: mappings merge, and the items of a list (containers, volumes,
    env, ports) by their `name`, volumeMounts by their `mountPath`. Other lists are replaced; null removes a key, `$patch: delete` an
    item."""

    @model_validator(mode="after")
    def _complete(self) -> Kubernetes:
        if self.topology and not self.queue:
            raise ValueError("topology is Kueue's, and does nothing without a queue: set queue, or remove topology")
        if self.hugepages is None and any(name.endswith("/efa") for name in self.rdma):
            raise ValueError("EFA without huge pages falls back to sockets: set hugepages to 5120Mi")
        return self


def _with_python(host: str, about: ValidationInfo) -> str:
    """The host with its Python: who asks it has no other setting at hand."""
    python = about.data.get("python")
    return host if python is None or ":" in host or about.data.get("container") else f"{host}:{python}"


class Slurm(Section):
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


class Compose(Section):
    patch: Values = Field(default_factory=dict)
    """JSON merge patch on the rendered file."""
