"""Pure functions from a JobSpec to manifests: no cluster, no clock, no network; same spec, same bytes.

A PyTorchJob (Kubeflow training-operator v1) or a TrainJob (Kubeflow Trainer v2, v1alpha1), which are the same pod in two frames; the
NetworkPolicy that every job gets; the ConfigMaps of its code; the Job that `lockstep prepare` submits.
"""

from __future__ import annotations

import base64
import json

from lockstep.jobs import command as commands
from lockstep.jobs.kubernetes import pod
from lockstep.jobs.kubernetes.pod import CODE_KEY, CODE_PART_BYTES, RENDERED, SUBMISSION
from lockstep.jobs.kubernetes.section import CONTAINERS, KINDS, KUEUE_QUEUE, k8s
from lockstep.jobs.manifest import HASH, JOB, MANAGED, SPEC, Manifest, holds, merge, without_none
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.spec.types import seconds
from lockstep.training.contract import UserError


def manifests(spec: JobSpec, submission: str = RENDERED) -> list[Manifest]:
    """[NetworkPolicy, PyTorchJob or TrainJob]: the objects of a job but those of its code, with `patch`."""
    return [network_policy(spec, submission), merge(job(spec, submission), k8s(spec).patch)]


def job(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """The job without `patch`."""
    kind = k8s(spec).kind
    body = _trainjob(spec, submission) if kind == "TrainJob" else _pytorchjob(spec, submission)
    return {
        "apiVersion": KINDS[kind][0],
        "kind": kind,
        "metadata": _metadata(spec, submission),
        "spec": without_none(body),
    }


def _metadata(spec: JobSpec, submission: str) -> Manifest:
    labels = pod.labels(spec)
    if queue := k8s(spec).queue:
        labels[KUEUE_QUEUE] = queue
    text = json.dumps(spec.record(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    annotations = {SPEC: text, **({SUBMISSION: submission} if spec.code is not None else {})}
    return without_none(
        {"name": spec.name, "namespace": k8s(spec).namespace, "labels": labels, "annotations": annotations}
    )


def _pytorchjob(spec: JobSpec, submission: str) -> Manifest:
    return {
        "nprocPerNode": str(spec.ranks),  # the CRD wants a text
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "ttlSecondsAfterFinished": seconds(k8s(spec).ttl),
            "activeDeadlineSeconds": spec.deadline_seconds,
            # A gang restart costs one of these a pod. With ExitCode the launcher counts, this is the backstop.
            "backoffLimit": (spec.elastic.max_nodes if spec.elastic else spec.nodes) * spec.max_restarts + 1,
        },
        "elasticPolicy": _elastic(spec),
        "pytorchReplicaSpecs": {"Worker": _workers(spec, submission)},
    }


def _elastic(spec: JobSpec) -> Manifest:
    low, high = (spec.elastic.min_nodes, spec.elastic.max_nodes) if spec.elastic else (spec.nodes, spec.nodes)
    return {
        "rdzvBackend": "c10d", "rdzvId": f"{spec.name}-{spec.hash()}", "rdzvPort": pod.RENDEZVOUS_PORT,
        "minReplicas": low, "maxReplicas": high,
    }  # fmt: skip


def _workers(spec: JobSpec, submission: str) -> Manifest:
    return {
        "replicas": spec.nodes,
        # Exit code 2 (wrong usage) must not be retried, which OnFailure would do.
        "restartPolicy": "ExitCode",
        "template": {
            "metadata": {"labels": pod.labels(spec), "annotations": pod.pod_annotations(spec)},
            "spec": pod.pod_spec(spec, submission),
        },
    }


def _trainjob(spec: JobSpec, submission: str) -> Manifest:
    """The runtime injects PET_*; the pod's own parts (volumes, security, affinity) travel in a `runtimePatch`."""
    container = pod.container(spec)
    template = pod.pod_spec(spec, submission)
    own = {
        "name": CONTAINERS["TrainJob"],
        "volumeMounts": container["volumeMounts"],
        "securityContext": container["securityContext"],
    }
    allowed = (
        "serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets",
        "securityContext", "terminationGracePeriodSeconds",
    )  # fmt: skip
    pod_patch = {key: template[key] for key in allowed if key in template} | {"containers": [own]}
    patch = {"metadata": {"labels": pod.labels(spec), "annotations": pod.pod_annotations(spec)}, "spec": pod_patch}
    node = {"name": CONTAINERS["TrainJob"], "template": {"spec": {"template": patch}}}
    return {
        "runtimeRef": {
            "name": k8s(spec).runtime,
            "kind": "ClusterTrainingRuntime",
            "apiGroup": "trainer.kubeflow.org",
        },
        "activeDeadlineSeconds": spec.deadline_seconds,
        "trainer": {
            "image": spec.image,
            "command": container["command"],
            "numNodes": spec.nodes,
            "numProcPerNode": spec.ranks,
            "resourcesPerNode": container["resources"],
            "env": container["env"],
        },
        "runtimePatches": [
            {"manager": "lockstep", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
        ],
    }


def network_policy(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """Only the job's own pods reach its ports (which ask nobody who he is), and Prometheus the metrics ports."""
    own = {"matchLabels": {JOB: spec.name, HASH: spec.hash()}}
    ports = [{"port": spec.metrics_port, "endPort": spec.metrics_port + spec.ranks - 1, "protocol": "TCP"}]
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": k8s(spec).prometheus_namespace}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": without_none(
            {
                "name": f"{spec.name}-{spec.hash() if submission == RENDERED else submission}",
                "namespace": k8s(spec).namespace,
                "labels": pod.labels(spec),
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
    labels = {JOB: spec.name, "lockstep/role": "code", SUBMISSION: submission, **MANAGED}
    found = []
    for index, name in enumerate(pod.code_map_names(spec, submission)):
        piece = packed[index * CODE_PART_BYTES : (index + 1) * CODE_PART_BYTES]
        metadata = without_none({"name": name, "namespace": k8s(spec).namespace, "labels": labels})
        data = {CODE_KEY: base64.b64encode(piece).decode()}
        found.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "binaryData": data}
        )
    return found


def preparation(spec: JobSpec) -> Manifest:
    """The Job of `lockstep prepare`: one pod that writes a recipe's shards onto the data volume.

    Raises:
        UserError: a spec without shards, or no volume to write them to.
    """
    if spec.recipe is None or spec.shards is None:
        raise UserError(f"{spec.name} has no shards: set recipe and shards, e.g. shards: /data/digits")
    if not any(holds(volume.path, spec.shards) for volume in spec.volumes):
        raise UserError(f"shards {spec.shards} is not on a volume: add one to volumes")
    if spec.image is None:
        raise UserError("image is not set: add it to the job, or pass --image")
    spec = spec.model_copy(update={"code": None})  # shards need none of it
    writable = spec.on_cpu().model_copy(
        update={
            "nodes": 1, "ranks_per_node": 1, "elastic": None,
            "volumes": [volume.model_copy(update={"read_only": False}) for volume in spec.volumes],
            "k8s": k8s(spec).model_copy(update={"rdma": {}, "topology": None, "hugepages": None}),
        }
    )  # fmt: skip
    template = pod.pod_spec(writable)
    container = {**template["containers"][0], "command": commands.shard(spec)}
    container.pop("ports")
    labels = {**pod.labels(spec), "lockstep/role": "prepare"}
    # Not the job's own label: `logs` and the NetworkPolicy must not take this pod for one of its nodes.
    labels["lockstep/job"] = f"{spec.name}-prepare"[:63].rstrip("-")
    name = f"{spec.name[:50].rstrip('-')}-prepare"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": without_none(
            {"name": name, "namespace": k8s(spec).namespace, "labels": {**labels, HASH: spec.hash()}}
        ),
        "spec": {
            "backoffLimit": 2,
            "activeDeadlineSeconds": min(spec.deadline_seconds, 6 * 3600),
            "ttlSecondsAfterFinished": 3600,
            # `training shard` refuses a folder that exists with exit code 2: done already, or wrong usage.
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": CONTAINERS["PyTorchJob"], "operator": "In", "values": [2]},
                    }
                ]
            },
            "template": {
                "metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}},
                "spec": {**template, "restartPolicy": "Never", "containers": [container]},
            },
        },
    }
