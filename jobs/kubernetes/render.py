"""Pure functions from a JobSpec to manifests: no cluster, no clock, no network; same spec, same bytes.

They render a PyTorchJob (Kubeflow training-operator v1) or a TrainJob (Kubeflow Trainer v2, v1alpha1), which are the same pod in two
frames. Every job gets a NetworkPolicy, and ConfigMaps of its code. The lint rules that read them are here, too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from .. import lint
from ..lint import volume_of
from ..manifest import (
    HASH,
    JOB,
    MANAGED,
    SPEC,
    Change,
    Manifest,
    changes,
    get,
    mappings,
    merge,
    seconds,
    spec_text,
    without_none,
)
from ..spec.model import (
    CODE_PARTS,
    GRACE_MARGIN,
    JobSpec,
    code_identity,
    container_environment,
    launch_command,
    literal,
    prepares,
)

KINDS = {
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""Custom resource of a job → API version, plural."""
CONTAINERS = {"PyTorchJob": "pytorch", "TrainJob": "node"}
"""Names of the ranks' container, as the operators expect them."""
KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
"""API versions that a cluster may have, the newer first."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
RENDEZVOUS_PORT = 23456
CODE_PART_BYTES = 900 << 10
"""Bytes of code in a ConfigMap. A server accepts 1 MiB for the whole object."""
CODE_KEY = "part"
CODE_VOLUME = "code"
SUBMISSION = "lockstep/submission"
"""Label of a ConfigMap and annotation of a job: the submission that made the object. It links ConfigMaps to their job."""
RENDERED = "rendered"
"""Value in place of a submission's id if nothing is submitted."""
MERGED_BY = ("mountPath", "name", "containerPort", "manager")
"""Keys by which the items of a patch's lists merge with those that are rendered: the first that all items have."""
MANAGER = "lockstep.dev/submit"
"""Manager of the patch in a TrainJob. Trainer refuses a name without a domain."""
LINGER_SECONDS = 30
"""Seconds that other workers stay after rank 0. The operator ends a job when it sees the first completed worker, and removes the logs of
the others. After this time it has seen rank 0's pod."""


def path_of(namespace: str, kind: str, name: str = "") -> str:
    """Returns the server's path of the jobs of a kind, or of one job."""
    version, plural = KINDS[kind]
    return f"/apis/{version}/namespaces/{namespace}/{plural}{f'/{name}' if name else ''}"


def of_kind(spec: JobSpec, kind: str = "PyTorchJob") -> JobSpec:
    """Returns the spec with this kind in place of `auto`, which a submission resolves before it renders. The hash stays that of the
    original spec."""
    if spec.k8s.kind != "auto":
        return spec
    own = spec.model_copy(update={"k8s": spec.k8s.model_copy(update={"kind": kind})})
    own.__dict__["_hash"] = spec.hash()
    return own


def manifests(spec: JobSpec, submission: str = RENDERED) -> list[Manifest]:
    """Returns [NetworkPolicy, PyTorchJob or TrainJob]: the objects of a job without those of its code, with `patch`."""
    return [network_policy(spec, submission), merge(job(spec, submission), spec.k8s.patch, MERGED_BY)]


def job(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """Returns the job without `patch`."""
    spec = of_kind(spec)
    kind, about = spec.k8s.kind, _metadata(spec, spec.name)
    marks = without_none({**about["labels"], KUEUE_QUEUE: spec.k8s.queue})
    annotations = {SPEC: spec_text(spec.record()), **({SUBMISSION: submission} if spec.code is not None else {})}
    of_pods = {"sidecar.istio.io/inject": "false"}  # a mesh's proxy never ends, so the pod would not end
    # If one pod is evicted, all pods start again.
    of_pods |= {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    template = {"metadata": {"labels": about["labels"], "annotations": of_pods}, "spec": pod_spec(spec, submission)}
    return {
        "apiVersion": KINDS[kind][0],
        "kind": kind,
        "metadata": {**about, "labels": marks, "annotations": annotations},
        "spec": _trainjob(spec, template) if kind == "TrainJob" else _pytorchjob(spec, template),
    }


def _pytorchjob(spec: JobSpec, template: Manifest) -> Manifest:
    workers = {
        "replicas": spec.nodes,
        # Exit code 2 (wrong usage) must not be retried, which OnFailure would do.
        "restartPolicy": "ExitCode",
        "template": template,
    }
    return {
        "nprocPerNode": str(spec.ranks),  # the CRD requires a string
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": seconds(spec.k8s.ttl),
            "activeDeadlineSeconds": seconds(spec.time_limit),
            # A restart of all pods costs one retry for each pod. With ExitCode the launcher counts, so this limit is a backstop.
            "backoffLimit": spec.nodes * spec.max_restarts + 1,
        },
        "elasticPolicy": {
            "rdzvBackend": "c10d", "rdzvId": f"{spec.name}-{spec.hash()}", "rdzvPort": RENDEZVOUS_PORT,
            "minReplicas": spec.nodes, "maxReplicas": spec.nodes,
        },
        "pytorchReplicaSpecs": {"Worker": workers},
    }  # fmt: skip


def _trainjob(spec: JobSpec, template: Manifest) -> Manifest:
    """Returns the spec of a TrainJob. The runtime injects PET_*. The pod's volumes, security and affinity are in a `runtimePatch`."""
    pod = template["spec"]
    (node,) = pod["containers"]
    own = {"name": CONTAINERS["TrainJob"], **{key: node[key] for key in ("volumeMounts", "securityContext")}}
    allowed = (
        "serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets",
        "securityContext", "terminationGracePeriodSeconds",
    )  # fmt: skip
    patch = {**template, "spec": {key: pod[key] for key in allowed if key in pod} | {"containers": [own]}}
    trainer = {
        "image": spec.image,
        "command": node["command"],
        "numNodes": spec.nodes,
        "numProcPerNode": spec.ranks,
        "resourcesPerNode": node["resources"],
        "env": node["env"],
    }
    replicated = {"name": CONTAINERS["TrainJob"], "template": {"spec": {"template": patch}}}
    return {
        "runtimeRef": {"name": spec.k8s.runtime, "kind": "ClusterTrainingRuntime", "apiGroup": "trainer.kubeflow.org"},
        "activeDeadlineSeconds": seconds(spec.time_limit),
        "trainer": without_none(trainer),
        "runtimePatches": [
            {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
        ],
    }


def _metadata(spec: JobSpec, name: str) -> Manifest:
    """Returns the metadata of an object of the job."""
    marks = {JOB: spec.name, HASH: spec.hash(), **MANAGED}
    return without_none({"name": name, "namespace": spec.k8s.namespace, "labels": marks})


def pod_spec(spec: JobSpec, submission: str) -> Manifest:
    settings = spec.k8s
    volumes, mounts = _storage(spec, submission)
    security = {
        "runAsNonRoot": True,
        "runAsUser": settings.run_as_user,
        "runAsGroup": settings.fs_group,
        "fsGroup": settings.fs_group,
        "fsGroupChangePolicy": "OnRootMismatch" if settings.fs_group is not None else None,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = {
        "serviceAccountName": settings.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.grace_seconds + GRACE_MARGIN,
        "priorityClassName": settings.priority_class,
        "nodeSelector": dict(sorted(settings.node_selector.items())) or None,
        "tolerations": settings.tolerations or None,
        "affinity": _affinity(spec),
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets] or None,
        "securityContext": without_none(security),
        "containers": [container(spec, mounts)],
        "volumes": volumes,
    }
    return without_none(pod)


def container(spec: JobSpec, mounts: list[Manifest]) -> Manifest:
    linger = LINGER_SECONDS if spec.k8s.kind == "PyTorchJob" else 0
    words = launch_command(spec, spec.run_directory, exit_codes="kubernetes", linger=linger)
    ports = [{"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT}]
    ports += [{"name": f"metrics-{rank}", "containerPort": spec.metrics_port + rank} for rank in range(spec.ranks)]
    return {
        "name": CONTAINERS["PyTorchJob"],
        **({"image": spec.image} if spec.image is not None else {}),
        "imagePullPolicy": spec.k8s.image_pull_policy,
        "command": [literal(word) for word in words],
        "env": environment(spec),
        "ports": ports,
        "resources": resources(spec),
        "volumeMounts": mounts,
        "workingDir": "/tmp",  # noqa: S108 - the pod's own, and the only place that is always writable
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # RDMA needs none: the container runtime's memlock limit bounds pinned memory.
            "capabilities": {"drop": ["ALL"]},
        },
    }


def environment(spec: JobSpec) -> list[Manifest]:
    """Returns the variables of the job. The operator appends its own after them, so that its values win."""
    values = {} if spec.gpus else {"OMP_NUM_THREADS": str(max(1, int(spec.cpus / spec.ranks)))}
    if spec.gpus and any(name.endswith("/efa") for name in spec.k8s.rdma):
        values["FI_PROVIDER"] = "efa"
    values |= container_environment(spec)
    items: list[Manifest] = [
        {"name": name, "value": literal(value)} for name, value in sorted(values.items()) if name not in spec.secrets
    ]
    return items + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
        for name, source in sorted(spec.secrets.items())
    ]


def resources(spec: JobSpec) -> Manifest:
    """Returns the resources of a pod. Requests equal limits (Guaranteed): a rank that is throttled or evicted stops all others."""
    whole = spec.cpus == int(spec.cpus)
    cpu = str(int(spec.cpus)) if whole else f"{max(1, round(spec.cpus * 1000))}m"
    amounts: dict[str, Any] = {"cpu": cpu, "memory": spec.memory}
    if spec.gpus:
        amounts[spec.k8s.gpu_resource] = str(spec.gpus)
    for name, count in sorted(spec.k8s.rdma.items()):
        amounts[name] = str(count)
    if spec.k8s.hugepages:
        amounts["hugepages-2Mi"] = spec.k8s.hugepages
    return {"requests": amounts, "limits": amounts}


def _affinity(spec: JobSpec) -> Manifest | None:
    if spec.k8s.spread == "none" or spec.nodes == 1:
        return None
    term = {"labelSelector": {"matchLabels": {JOB: spec.name}}, "topologyKey": "kubernetes.io/hostname"}
    if spec.k8s.spread == "required":
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    soft = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [soft]}}


def _storage(spec: JobSpec, submission: str) -> tuple[list[Manifest], list[Manifest]]:
    """Returns the pod's volumes, and their mounts in the container."""
    volumes: list[Manifest] = [
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [{"name": "dshm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108
    if volume_of(spec, spec.run_directory) is None:
        volumes.append({"name": "run", "emptyDir": {}})
        mounts.append({"name": "run", "mountPath": spec.run_directory})
    names: dict[str, str] = {}
    for index, volume in enumerate(spec.volumes):
        again = volume.claim in names
        name = names.setdefault(volume.claim, f"claim-{len(names)}")
        if again and spec.k8s.kind == "TrainJob":  # a TrainJob keys mounts by the volume's name
            again, name = False, f"{name}-{index}"
        if not again:
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim}})
        mounts.append({"name": name, "mountPath": volume.path, **({"readOnly": True} if volume.read_only else {})})
    if spec.code is not None:  # all pieces in one folder
        sources = [
            {"configMap": {"name": name, "items": [{"key": CODE_KEY, "path": f"{CODE_KEY}-{index:03d}"}]}}
            for index, name in enumerate(code_map_names(spec, submission))
        ]
        volumes.append({"name": CODE_VOLUME, "projected": {"defaultMode": 0o444, "sources": sources}})
        mounts.append({"name": CODE_VOLUME, "mountPath": CODE_PARTS, "readOnly": True})
    return volumes, mounts


def code_map_names(spec: JobSpec, submission: str) -> list[str]:
    """Returns the names of the ConfigMaps with the job's code, in the order of the archive's pieces."""
    assert spec.code is not None
    parts = max(1, -(-spec.code.packed // CODE_PART_BYTES))
    return [f"{spec.name}-{code_identity(spec)[:12]}-{submission}-{index}" for index in range(parts)]


def network_policy(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """Returns the policy: only the job's own pods reach its ports, which authenticate no client; Prometheus reaches the metrics ports."""
    own = {"matchLabels": {JOB: spec.name}}
    ports = [{"port": spec.metrics_port, "endPort": spec.metrics_port + spec.ranks - 1, "protocol": "TCP"}]
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": spec.k8s.prometheus_namespace}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(spec, f"{spec.name}-{submission}"),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [{"namespaceSelector": prometheus}], "ports": ports},
            ],
        },
    }


def code_maps(spec: JobSpec, submission: str, packed: bytes) -> Iterator[Manifest]:
    """Yields the ConfigMaps that hold the archive `packed`. They cannot be changed, only deleted."""
    marks = {JOB: spec.name, "lockstep/role": "code", SUBMISSION: submission, **MANAGED}
    for index, name in enumerate(code_map_names(spec, submission)):
        piece = packed[index * CODE_PART_BYTES : (index + 1) * CODE_PART_BYTES]
        data = {CODE_KEY: base64.b64encode(piece).decode()}
        metadata = {**_metadata(spec, name), "labels": marks}
        yield {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": data}


class Subject(lint.Subject):
    """A PyTorchJob or TrainJob."""

    volumes, section = True, "k8s"
    taken = re.compile(
        r"PET_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|GROUP_RANK|TORCHELASTIC_.*"
    )
    found_by = re.compile(
        r"apiVersion|kind|metadata(\.(name|namespace|labels|annotations)(\..*)?)?|.*\.template\.metadata(\.labels(\..*)?)?"
        r"|spec(\.(runPolicy|trainer|runtimePatches|pytorchReplicaSpecs(\.Worker)?))?"
        r"|.*(\.trainingRuntimeSpec|\.replicatedJobs(\[node\])?|\.template(\.spec(\.containers(\[(pytorch|node)\])?)?)?)"
    )

    @cached_property
    def patched(self) -> list[Change]:
        if not self.spec.k8s.patch:
            return []
        plain = job(self.spec)  # without a submission: a patch changes every submission alike
        return [*changes(plain, merge(plain, self.spec.k8s.patch, MERGED_BY))]

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The environment of the ranks' container, unless the patch has moved the container."""
        patched = next((item for item in self.objects if item.get("kind") != "NetworkPolicy"), {})
        worker = get(patched, "spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers")
        ours = [item for item in mappings(worker) if item.get("name") == CONTAINERS["PyTorchJob"]]
        in_trainer = self.spec.k8s.kind == "TrainJob"
        items = get(patched, "spec", "trainer", "env") if in_trainer else get(ours, 0, "env")
        return {str(item.get("name")): item.get("value") for item in mappings(items)}


RULES = lint.Rules(Subject)
rule = RULES.rule


@rule("LS001")
def name_length(subject: Subject) -> Iterator[str]:
    """Pod and Service names hold the job's name and have at most 63 characters."""
    name, last = subject.spec.name, subject.spec.nodes - 1
    longest = 63 - len(f"-node-0-{last}-xxxxx" if subject.spec.k8s.kind == "TrainJob" else f"-worker-{last}")
    if len(name) > longest:
        yield f"the name {name[:40]}… has {len(name)} characters, at most {longest} are possible with these pods: shorten it"


@rule("LS019", "warning")
def durable_run(subject: Subject) -> Iterator[str]:
    """A run directory on no persistent volume is gone with the pod; what is kept in a bucket is not."""
    spec = subject.spec
    if prepares(spec.command):  # a preparation's run directory is the folder of shards
        return
    if spec.checkpoints_bucket is None and volume_of(spec, spec.run_directory) is None:
        yield (
            f"run_dir {spec.run_directory} is not on a volume: a restart would begin anew, uncounted; add one to volumes, or set "
            "checkpoint.to to a bucket"
        )


@rule("LS036")
def trainjob_limits(subject: Subject) -> Iterator[str]:
    """What a TrainJob's pods get beyond a patch is set in the runtime."""
    given = subject.spec.plain().get("k8s", {}) if subject.spec.k8s.kind == "TrainJob" else {}
    for name in ("priority_class", "image_pull_policy", "ttl"):
        if name in given:
            yield f"a TrainJob cannot set k8s.{name}: put it into the runtime that k8s.runtime names, or use k8s.kind PyTorchJob"


@rule("LS042")
def image_registry(subject: Subject) -> Iterator[str]:
    """A name without a registry means Docker Hub's own images. What was built on one machine is on no other."""
    spec, image = subject.spec, subject.spec.image or ""
    # A program's image may be one of Docker Hub's own.
    unpublished = image and "/" not in image and spec.command is None and spec.k8s.image_pull_policy != "Never"
    if unpublished and spec.nodes > 1:
        yield (
            f"image {image} has no registry in its name, so the nodes would look for it at Docker Hub: push it (`make push`) and name it "
            "registry/name, or set k8s.image_pull_policy Never where it was loaded onto every node"
        )
