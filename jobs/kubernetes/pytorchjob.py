"""PyTorchJob (Kubeflow training-operator v1) and the NetworkPolicy that every job gets."""

from __future__ import annotations

import json

from lockstep.jobs.kubernetes import pod
from lockstep.jobs.kubernetes.code import RENDERED, SUBMISSION
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.manifest import HASH, JOB, SPEC, Manifest, merge, without_none
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.spec.types import seconds

API_VERSION = "kubeflow.org/v1"


def render(spec: JobSpec, submission: str = RENDERED) -> list[Manifest]:
    """[NetworkPolicy, PyTorchJob]: the policy first, so that no pod ever runs without it."""
    return [network_policy(spec), merge(job(spec, submission), k8s(spec).patch)]


def metadata(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    labels = pod.labels(spec)
    if queue := k8s(spec).queue:
        labels[pod.KUEUE_QUEUE] = queue
    text = json.dumps(spec.record(), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    annotations = {SPEC: text, **({SUBMISSION: submission} if spec.code is not None else {})}
    return without_none(
        {"name": spec.name, "namespace": k8s(spec).namespace, "labels": labels, "annotations": annotations}
    )


def job(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """The PyTorchJob without `patch`."""
    return {
        "apiVersion": API_VERSION,
        "kind": "PyTorchJob",
        "metadata": metadata(spec, submission),
        "spec": without_none(
            {
                "nprocPerNode": str(spec.ranks),  # the CRD wants a text
                "runPolicy": {
                    "cleanPodPolicy": "Running",
                    "ttlSecondsAfterFinished": _ttl(spec),
                    "activeDeadlineSeconds": spec.deadline_seconds,
                    # A gang restart costs one of these a pod. With ExitCode the launcher counts, this is the backstop.
                    "backoffLimit": _pods(spec) * spec.max_restarts + 1,
                },
                "elasticPolicy": _elastic(spec),
                "pytorchReplicaSpecs": _replicas(spec, submission),
            }
        ),
    }


def _ttl(spec: JobSpec) -> int:
    return seconds(k8s(spec).ttl)


def _pods(spec: JobSpec) -> int:
    return spec.elastic.max_nodes if spec.elastic else spec.nodes


def _elastic(spec: JobSpec) -> Manifest | None:
    if pod.has_master(spec):
        return None
    low, high = (spec.elastic.min_nodes, spec.elastic.max_nodes) if spec.elastic else (spec.nodes, spec.nodes)
    return {
        "rdzvBackend": "c10d", "rdzvId": f"{spec.name}-{spec.hash()}", "rdzvPort": pod.RENDEZVOUS_PORT,
        "minReplicas": low, "maxReplicas": high,
    }  # fmt: skip


def _replicas(spec: JobSpec, submission: str) -> Manifest:
    def replica(count: int) -> Manifest:
        return {
            "replicas": count,
            # Exit code 2 (wrong usage) must not be retried, which OnFailure would do.
            "restartPolicy": "ExitCode",
            "template": {
                "metadata": {"labels": pod.labels(spec), "annotations": pod.pod_annotations(spec)},
                "spec": pod.pod_spec(spec, submission),
            },
        }

    if not pod.has_master(spec):
        return {"Worker": replica(spec.nodes)}
    replicas = {"Master": replica(1)}
    if spec.nodes > 1:
        replicas["Worker"] = replica(spec.nodes - 1)
    return replicas


def network_policy(spec: JobSpec) -> Manifest:
    """Only the job's own pods reach its ports (which ask nobody who he is), and Prometheus the metrics ports."""
    own = {"matchLabels": {JOB: spec.name, HASH: spec.hash()}}
    ports = [{"port": spec.metrics_port, "endPort": spec.metrics_port + spec.ranks - 1, "protocol": "TCP"}]
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": k8s(spec).prometheus_namespace}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": without_none(
            {
                "name": f"{spec.name}-{spec.hash()}",
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
