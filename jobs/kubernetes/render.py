"""Pure functions from a JobSpec to manifests: no cluster, no clock, no network; same spec, same bytes.

A PyTorchJob (Kubeflow training-operator v1) or a TrainJob (Kubeflow Trainer v2, v1alpha1), which are the same pod in two frames; the
NetworkPolicy that every job gets; the ConfigMaps of its code.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from lockstep.training.contract import ENV_METRICS_PORT, METRICS_PORT

from .. import command as commands
from ..command import GRACE_MARGIN
from ..manifest import HASH, JOB, MANAGED, SPEC, Manifest, check_directives, get, holds, merge, without_none
from ..spec.model import CODE_PARTS, JobSpec
from ..spec.types import seconds

KINDS = {
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
}
"""The custom resources that a job can be → API version, plural."""
CONTAINERS = {"PyTorchJob": "pytorch", "TrainJob": "node"}
"""The container that the ranks run in, by the name that the operator looks for."""
KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
"""API versions that a cluster may have, the newer first."""
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
RENDEZVOUS_PORT = 23456
CODE_PART_BYTES = 900 << 10
"""Of a ConfigMap's binaryData. A server takes 1 MiB, with everything else that is in the object."""
CODE_KEY = "part"
CODE_VOLUME = "code"
SUBMISSION = "lockstep/submission"
"""Label of a ConfigMap and annotation of a job: which submission made it, and so which ones are the job's."""
RENDERED = "rendered"
"""In place of a submission's word, where nothing is submitted."""
MERGED_BY = ("mountPath", "name", "containerPort", "manager")
"""Keys by which the items of a patch's lists merge with those that are rendered: the first that all items have."""
MANAGER = "lockstep.dev/submit"
"""Of the patch in a TrainJob. Trainer refuses a name without a domain."""
LINGER_SECONDS = 30
"""The operator ends a job of workers with the first that it sees completed, and takes the logs of the others away: by then
it has seen rank 0's pod."""


def path_of(kind: str, namespace: str) -> str:
    """Where the server has the jobs of a kind."""
    version, plural = KINDS[kind]
    return f"/apis/{version}/namespaces/{namespace}/{plural}"


def kind_of(spec: JobSpec) -> str:
    """Which custom resource the job is; a submission asks the cluster what `auto` means before it renders."""
    return "PyTorchJob" if spec.k8s.kind == "auto" else spec.k8s.kind


def of_kind(spec: JobSpec, kind: str) -> JobSpec:
    """The spec with this kind in place of `auto`. Its hash stays that of the spec as it was written."""
    if spec.k8s.kind != "auto":
        return spec
    return of_hash(spec.model_copy(update={"k8s": spec.k8s.model_copy(update={"kind": kind})}), spec.hash())


def of_hash(spec: JobSpec, value: str) -> JobSpec:
    """The spec under the hash that a job has already, whatever its own would be now."""
    spec = spec.model_copy()
    spec.__dict__["_hash"] = value
    return spec


def manifests(spec: JobSpec, submission: str = RENDERED) -> list[Manifest]:
    """[NetworkPolicy, PyTorchJob or TrainJob]: the objects of a job but those of its code, with `patch`."""
    merged = merge(job(spec, submission), spec.k8s.patch, MERGED_BY)
    check_directives(merged)
    return [network_policy(spec, submission), merged]


def submission_in(policy: Manifest, spec: JobSpec) -> str:
    """The word that a job's NetworkPolicy was rendered with."""
    word = str(policy["metadata"]["name"]).removeprefix(f"{spec.name}-")
    return RENDERED if word == spec.hash() else word


def job(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """The job without `patch`."""
    spec = of_kind(spec, kind := kind_of(spec))
    body = _trainjob(spec, submission) if kind == "TrainJob" else _pytorchjob(spec, submission)
    return {
        "apiVersion": KINDS[kind][0],
        "kind": kind,
        "metadata": _metadata(spec, submission),
        "spec": without_none(body),
    }


def _metadata(spec: JobSpec, submission: str) -> Manifest:
    marks = labels(spec)
    if queue := spec.k8s.queue:
        marks[KUEUE_QUEUE] = queue
    text = json.dumps(spec.record(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    annotations = {SPEC: text, **({SUBMISSION: submission} if spec.code is not None else {})}
    metadata: Manifest = without_none(
        {"name": spec.name, "namespace": spec.k8s.namespace, "labels": marks, "annotations": annotations}
    )
    return metadata


def _pytorchjob(spec: JobSpec, submission: str) -> Manifest:
    return {
        "nprocPerNode": str(spec.ranks),  # the CRD wants a text
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": seconds(spec.k8s.ttl),
            "activeDeadlineSeconds": spec.deadline_seconds,
            # A gang restart costs one of these a pod. With ExitCode the launcher counts, this is the backstop.
            "backoffLimit": spec.nodes * spec.max_restarts + 1,
        },
        "elasticPolicy": {
            "rdzvBackend": "c10d", "rdzvId": f"{spec.name}-{spec.hash()}", "rdzvPort": RENDEZVOUS_PORT,
            "minReplicas": spec.nodes, "maxReplicas": spec.nodes,
        },
        "pytorchReplicaSpecs": {"Worker": _workers(spec, submission)},
    }  # fmt: skip


def _workers(spec: JobSpec, submission: str) -> Manifest:
    return {
        "replicas": spec.nodes,
        # Exit code 2 (wrong usage) must not be retried, which OnFailure would do.
        "restartPolicy": "ExitCode",
        "template": {
            "metadata": {"labels": {**spec.k8s.pod_labels, **labels(spec)}, "annotations": pod_annotations(spec)},
            "spec": pod_spec(spec, submission),
        },
    }


def _trainjob(spec: JobSpec, submission: str) -> Manifest:
    """The runtime injects PET_*; the pod's own parts (volumes, security, affinity) travel in a `runtimePatch`."""
    node = container(spec)
    template = pod_spec(spec, submission)
    own = {
        "name": CONTAINERS["TrainJob"],
        "volumeMounts": node["volumeMounts"],
        "securityContext": node["securityContext"],
    }
    allowed = (
        "serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets",
        "securityContext", "terminationGracePeriodSeconds",
    )  # fmt: skip
    pod_patch = {key: template[key] for key in allowed if key in template} | {"containers": [own]}
    patch = {
        "metadata": {"labels": {**spec.k8s.pod_labels, **labels(spec)}, "annotations": pod_annotations(spec)},
        "spec": pod_patch,
    }
    replicated = {"name": CONTAINERS["TrainJob"], "template": {"spec": {"template": patch}}}
    return {
        "runtimeRef": {
            "name": spec.k8s.runtime,
            "kind": "ClusterTrainingRuntime",
            "apiGroup": "trainer.kubeflow.org",
        },
        "activeDeadlineSeconds": spec.deadline_seconds,
        "trainer": {
            "image": spec.image,
            "command": node["command"],
            "numNodes": spec.nodes,
            "numProcPerNode": spec.ranks,
            "resourcesPerNode": node["resources"],
            "env": node["env"],
        },
        "runtimePatches": [
            {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
        ],
    }


def template(job: Manifest) -> Any:
    """The pods' template in a job; None where a patch has left none."""
    if job.get("kind") == "PyTorchJob":
        return get(job, "spec", "pytorchReplicaSpecs", "Worker", "template")
    jobs = get(job, "spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    return get(jobs, 0, "template", "spec", "template")


def labels(spec: JobSpec) -> dict[str, str]:
    return {JOB: spec.name, HASH: spec.hash(), **MANAGED}


def pod_annotations(spec: JobSpec) -> dict[str, str]:
    annotations = {"sidecar.istio.io/inject": "false"}  # a mesh's proxy never ends, and so would the pod
    # With one of its pods all of them would start again.
    annotations |= {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    if spec.k8s.topology:
        annotations[f"kueue.x-k8s.io/podset-{spec.k8s.topology}-topology"] = spec.k8s.topology_level
    return {**annotations, **spec.k8s.pod_annotations}


def pod_spec(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    settings = spec.k8s
    pod: Manifest = without_none(
        {
            "serviceAccountName": settings.service_account,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": spec.grace_seconds + GRACE_MARGIN,
            "priorityClassName": settings.priority_class,
            "schedulerName": settings.scheduler_name,
            "nodeSelector": dict(sorted(settings.node_selector.items())) or None,
            "tolerations": [item.model_dump(exclude_none=True) for item in settings.tolerations] or None,
            "affinity": _affinity(spec),
            "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets] or None,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": settings.run_as_user,
                "runAsGroup": settings.fs_group,
                "fsGroup": settings.fs_group,
                "fsGroupChangePolicy": "OnRootMismatch" if settings.fs_group is not None else None,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container(spec)],
            "volumes": _volumes(spec, submission),
        }
    )
    return pod


def container(spec: JobSpec) -> Manifest:
    ports = [{"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT}]
    ports += [{"name": f"metrics-{rank}", "containerPort": spec.metrics_port + rank} for rank in range(spec.ranks)]
    return {
        "name": CONTAINERS["PyTorchJob"],
        "image": spec.image,
        "imagePullPolicy": spec.k8s.image_pull_policy,
        "command": [_literal(word) for word in _command(spec)],
        "env": environment(spec),
        "ports": ports,
        "resources": resources(spec),
        "volumeMounts": _mounts(spec),
        "workingDir": "/tmp",  # noqa: S108 - the pod's own, and the only place that is always writable
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {
                "drop": ["ALL"]
            },  # RDMA needs none: what may be pinned is the container runtime's memlock limit
        },
    }


def _command(spec: JobSpec) -> list[str]:
    linger = LINGER_SECONDS if kind_of(spec) == "PyTorchJob" else 0
    return commands.launch(spec, spec.run_directory, exit_codes="kubernetes", linger=linger)


def environment(spec: JobSpec) -> list[Manifest]:
    """The variables of the job. The operator appends its own after them, so that its values win."""
    values = {
        "HOME": "/tmp",  # noqa: S108 - the root is read-only
        "PYTHONUNBUFFERED": "1",
        ENV_METRICS_PORT: str(spec.metrics_port) if spec.metrics_port != METRICS_PORT else None,
        # The image shows all GPUs to whoever starts it by hand. Where nvidia's runtime is the default, this job would see them.
        "NVIDIA_VISIBLE_DEVICES": None if spec.gpus else "void",
        "OMP_NUM_THREADS": None if spec.gpus else str(max(1, int(spec.cpus / spec.ranks))),
    }
    if spec.gpus:
        values["NCCL_DEBUG"] = spec.k8s.nccl_debug
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
        values["NCCL_SOCKET_IFNAME"] = spec.k8s.socket_interface
        values["NCCL_IB_HCA"] = spec.k8s.ib_hca
        if any(name.endswith("/efa") for name in spec.k8s.rdma):
            values["FI_PROVIDER"] = "efa"
    values["GLOO_SOCKET_IFNAME"] = spec.k8s.socket_interface  # tensors of the CPU go by gloo, in a job with GPUs, too
    values |= spec.env
    items: list[Manifest] = [
        {"name": name, "value": _literal(value)}
        for name, value in sorted(values.items())
        if value is not None and name not in spec.secrets
    ]
    return items + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
        for name, source in sorted(spec.secrets.items())
    ]


def resources(spec: JobSpec) -> Manifest:
    """Requests equal limits (Guaranteed): a training rank that is throttled or evicted stops all the others."""
    amounts: dict[str, Any] = {"cpu": cpu(spec.cpus), "memory": spec.memory}
    if spec.gpus:
        amounts[spec.k8s.gpu_resource] = str(spec.gpus)
    for name, count in sorted(spec.k8s.rdma.items()):
        amounts[name] = str(count)
    if spec.k8s.hugepages:
        amounts["hugepages-2Mi"] = spec.k8s.hugepages
    return {"requests": amounts, "limits": amounts}


def cpu(cores: float) -> str:
    return str(int(cores)) if cores == int(cores) else f"{max(1, round(cores * 1000))}m"


def _affinity(spec: JobSpec) -> Manifest | None:
    if spec.k8s.spread == "none" or spec.nodes == 1:
        return None
    term = {"labelSelector": {"matchLabels": {JOB: spec.name}}, "topologyKey": "kubernetes.io/hostname"}
    if spec.k8s.spread == "required":
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    soft = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [soft]}}


def _volumes(spec: JobSpec, submission: str) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if not any(holds(volume.path, spec.run_directory) for volume in spec.volumes):
        volumes.append({"name": "run", "emptyDir": {}})
    claims = dict(zip(_claim_names(spec), (volume.claim for volume in spec.volumes)))
    volumes += [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()]
    return volumes + ([_code_volume(spec, submission)] if spec.code is not None else [])


def _claim_names(spec: JobSpec) -> list[str]:
    """The pod's volume of each of the job's. A TrainJob's mounts are keyed by it, so there a claim that is mounted twice is two."""
    claims = [volume.claim for volume in spec.volumes]
    names = [f"claim-{list(dict.fromkeys(claims)).index(claim)}" for claim in claims]
    twice = [kind_of(spec) == "TrainJob" and name in names[:index] for index, name in enumerate(names)]
    return [f"{name}-{index}" if again else name for index, (name, again) in enumerate(zip(names, twice))]


def _mounts(spec: JobSpec) -> list[Manifest]:
    mounts: list[Manifest] = [{"name": "dshm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108
    if not any(holds(volume.path, spec.run_directory) for volume in spec.volumes):
        mounts.append({"name": "run", "mountPath": spec.run_directory})
    for name, volume in zip(_claim_names(spec), spec.volumes):
        mount: Manifest = {"name": name, "mountPath": volume.path}
        mounts.append({**mount, "readOnly": True} if volume.read_only else mount)
    return mounts + (
        [{"name": CODE_VOLUME, "mountPath": CODE_PARTS, "readOnly": True}] if spec.code is not None else []
    )


def code_map_names(spec: JobSpec, submission: str) -> list[str]:
    """Of the ConfigMaps with the job's code, in the order of the archive's pieces."""
    assert spec.code is not None
    parts = max(1, -(-spec.code.packed // CODE_PART_BYTES))
    return [f"{spec.name}-{commands.identity(spec)[:12]}-{submission}-{index}" for index in range(parts)]


def _code_volume(spec: JobSpec, submission: str) -> Manifest:
    """All pieces of the code, in one folder."""
    sources = [
        {"configMap": {"name": name, "items": [{"key": CODE_KEY, "path": f"{CODE_KEY}-{index:03d}"}]}}
        for index, name in enumerate(code_map_names(spec, submission))
    ]
    return {"name": CODE_VOLUME, "projected": {"defaultMode": 0o444, "sources": sources}}


def _literal(text: str) -> str:
    """The kubelet expands `$(NAME)` in commands and values; `$$` is a dollar sign."""
    return text.replace("$", "$$")


def network_policy(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """Only the job's own pods reach its ports (which ask nobody who he is), and Prometheus the metrics ports."""
    own = {"matchLabels": {JOB: spec.name, HASH: spec.hash()}}
    ports = [{"port": spec.metrics_port, "endPort": spec.metrics_port + spec.ranks - 1, "protocol": "TCP"}]
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": spec.k8s.prometheus_namespace}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": without_none(
            {
                "name": f"{spec.name}-{spec.hash() if submission == RENDERED else submission}",
                "namespace": spec.k8s.namespace,
                "labels": labels(spec),
            }
        ),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": own}]},
                {"from": [{"namespaceSelector": prometheus}], "ports": ports},
            ],
        },
    }


def code_maps(spec: JobSpec, submission: str, packed: bytes) -> list[Manifest]:
    """The ConfigMaps that hold the archive `packed`. They cannot be changed, only deleted."""
    marks = {JOB: spec.name, "lockstep/role": "code", SUBMISSION: submission, **MANAGED}
    maps = []
    for index, name in enumerate(code_map_names(spec, submission)):
        piece = packed[index * CODE_PART_BYTES : (index + 1) * CODE_PART_BYTES]
        metadata = without_none({"name": name, "namespace": spec.k8s.namespace, "labels": marks})
        data = {CODE_KEY: base64.b64encode(piece).decode()}
        maps.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": data}
        )
    return maps
