"""The types of the settings in job.yaml, and `k8s:`, `slurm:`, `compose:`. Parsed strictly: a typing error is no other amount."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    model_validator,
)

from lockstep.training.config import settings
from lockstep.training.contract import BUCKET_URL

SIZE = r"^[1-9][0-9]{0,6}(Ki|Mi|Gi|Ti)$"
DURATION = r"^([1-9][0-9]{0,3}d)?([1-9][0-9]{0,4}h)?([1-9][0-9]{0,5}m)?([1-9][0-9]{0,6}s)?$"
LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
PATH = r"^(/(\.?[A-Za-z0-9_-][A-Za-z0-9._-]*)?)+$"
"""An absolute path without `..`."""
PATH_OR_BUCKET = f"{PATH}|^{BUCKET_URL}$"
LOCAL_PATH = r"^[A-Za-z0-9._/][A-Za-z0-9._/ -]*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
IMAGE = r"^[a-z0-9]([a-zA-Z0-9._/:@-]{0,510}[a-zA-Z0-9])?$"
WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,@+=-]{0,254}$"
CONSTRAINT = r"^[A-Za-z0-9_][A-Za-z0-9_.,@+=*&|()\[\]!-]{0,254}$"
MODULE = r"^[A-Za-z0-9_][A-Za-z0-9_./+-]{0,254}$"
MOUNT = r"^/[A-Za-z0-9._/-]*(:/[A-Za-z0-9._/-]*(:ro)?)?$"
CONTAINER_IMAGE = r"^[A-Za-z0-9/.][A-Za-z0-9._/:@#+-]{0,511}$"
SSH_HOST = r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,99}@)?[A-Za-z0-9][A-Za-z0-9_.-]{0,149}(:/[A-Za-z0-9._/+-]{1,249})?$"


class Section(settings.Section):
    """A group of settings: as those of a recipe, and frozen."""

    model_config = ConfigDict(frozen=True)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text of at most `longest` characters that matches the pattern. An error says what was `expected`."""

    pattern: str
    expected: str
    longest: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        text = {"type": "str", "pattern": self.pattern, "min_length": 1, "max_length": self.longest, "strict": True}
        about = {"custom_error_type": "text", "custom_error_message": f"must be {self.expected}"}
        return {"type": "custom-error", "schema": text, **about}


def _plain(text: str) -> str:
    if any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in text):
        raise ValueError("must not hold control characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode") from None
    return text


def _json_only(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the value if it survives JSON, by which patches and overrides travel. YAML can also make dates, sets and keys that are
    numbers."""
    try:
        text = json.dumps(value, allow_nan=False)
        if json.loads(text) != value:
            raise ValueError("must hold names and plain values only")
        _plain(text.encode().decode("unicode_escape") if "\\u" in text else text)
    except (TypeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"must hold names and plain values only ({str(error)[:80]})") from None
    return value


Size = Annotated[str, Pattern(SIZE, "a size such as 512Mi or 32Gi (a whole number, then Ki, Mi, Gi or Ti)", 9)]
Duration = Annotated[str, Pattern(DURATION, "a duration such as 90s, 30m, 2h or 1d12h", 28)]
Label = Annotated[str, Pattern(LABEL, "lower-case letters, digits and -, a letter first, at most 63", 63)]
Subdomain = Annotated[str, Pattern(SUBDOMAIN, "lower-case letters, digits, - and .", 253)]
AbsolutePath = Annotated[str, Pattern(PATH, "an absolute path of letters, digits, . _ - and /, without ..", 1024)]
AbsolutePathOrBucket = Annotated[
    str, Pattern(PATH_OR_BUCKET, "an absolute path, or s3://BUCKET/PREFIX (gs://, az://)", 1024)
]
AnyPath = Annotated[str, Pattern(LOCAL_PATH, "a path of letters, digits, spaces, . _ - and /", 1024)]
Variable = Annotated[str, Pattern(VARIABLE, "a variable name of letters, digits and _", 255)]
Image = Annotated[str, Pattern(IMAGE, "an image such as registry/name:tag or name@sha256:…", 512)]
Word = Annotated[str, Pattern(WORD, "one word of letters, digits and _ . , @ + = -", 255)]
SshHost = Annotated[
    str, Pattern(SSH_HOST, "a host of ssh: login.example, me@login.example or login.example:/venv/bin/python", 500)
]
Constraint = Annotated[str, Pattern(CONSTRAINT, "features such as a100&nvlink", 255)]
Module = Annotated[str, Pattern(MODULE, "an environment module such as cuda/12.4", 255)]
Mount = Annotated[str, Pattern(MOUNT, "/path, /path:/inside or /path:/inside:ro", 2048)]
ContainerImage = Annotated[str, Pattern(CONTAINER_IMAGE, "an image such as registry/name:tag or /images/x.sqsh", 512)]
Text = Annotated[str, AfterValidator(_plain)]
Name = Annotated[Text, Field(min_length=1, max_length=316)]
"""A name that only the cluster reads, and checks."""
ShellLine = Annotated[str, Pattern(r"^[^\n]*$", "one line: write one item per line", 10_000), AfterValidator(_plain)]
Values = Annotated[dict[str, Any], AfterValidator(_json_only)]


PLACES = {"k8s": {"namespace", "context"}, "slurm": {"host"}}
"""Section → its settings that name the place of a job. They are no part of the job's identity."""


class Code(Section):
    path: Text = Field(default=".", min_length=1, max_length=1024)
    """The folder, seen from the job file's; where there is no file, from the current one."""
    hash: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Identity of the code, which submit finds. One that is given names a copy that this machine keeps still."""
    packed: int = Field(default=0, ge=0)
    """Bytes of its archive, which submit finds, too."""


def _folder(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _or_text(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(0, {"type": "string"})


CodeOrNone = Annotated[Code | None, BeforeValidator(_folder), Field(json_schema_extra=_or_text)]
"""`code: .` is `code: {path: .}`."""


class Volume(Section):
    claim: Subdomain
    """The PersistentVolumeClaim (Kubernetes) or named volume (Compose)."""
    path: AbsolutePath
    """Where it is mounted."""
    read_only: bool = False
    """Mounted read-only in the training job; `lockstep prepare` mounts it writable."""


class SecretKey(Section):
    secret: Subdomain
    """Name of the Secret."""
    key: Name
    """Key within it."""


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
    priority_class: Subdomain | None = None
    """PriorityClass of a PyTorchJob's pods: which pods are scheduled first, and which may be evicted for others. Null: the
    cluster's default."""
    service_account: Subdomain | None = None
    """ServiceAccount of the pods; its token is not mounted. Null: the namespace's `default`."""
    image_pull_secrets: list[Subdomain] = Field(default_factory=list, max_length=20)
    """Secrets with the credentials of private registries, from the job's namespace. Empty: those of the ServiceAccount."""
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    """When a node pulls the image of a PyTorchJob: if it does not have it, at every start, or never (it was loaded onto the
    node by hand)."""
    node_selector: dict[Name, Text] = Field(default_factory=dict)
    """Labels that a node must have, e.g. `{example.com/pool: a100}`. Empty: any node."""
    tolerations: list[Values] = Field(default_factory=list, max_length=50)
    """Taints that the pods tolerate, as a pod has them: `{key: gpu, operator: Exists}`. Without `operator` the values must be equal."""
    spread: Literal["required", "preferred", "none"] = "required"
    """One pod per host: always, if possible, or not required. With `none`, two nodes of a job may share a machine."""
    gpu_resource: Name = "nvidia.com/gpu"
    """Name that a GPU is requested as: the name that the cluster's device plugin gives it."""
    rdma: dict[Name, Annotated[int, Field(ge=1, le=64)]] = Field(default_factory=dict)
    """RDMA devices per node, e.g. `{rdma/hca_shared: 1}` or `{vpc.amazonaws.com/efa: 4}`."""
    hugepages: Size | None = None
    """hugepages-2Mi per node; EFA needs 5120Mi."""
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
    env, ports) by their `name`, volumeMounts by their `mountPath`. Other lists are replaced; null removes a key."""

    @model_validator(mode="after")
    def _complete(self) -> Kubernetes:
        if self.hugepages is None and any(name.endswith("/efa") for name in self.rdma):
            raise ValueError("EFA without huge pages falls back to sockets: set hugepages to 5120Mi")
        return self


def _with_python(host: str, about: ValidationInfo) -> str:
    """Returns the host with its Python: the code that connects to the host has no other setting."""
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
    gpu_type: Word | None = None
    """Name of the GPUs in the cluster's GRES, e.g. `a100`; null: any."""
    array_parallelism: int = Field(default=256, ge=1, le=100000)
    """Runs of a sweep that may run at the same time."""
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
