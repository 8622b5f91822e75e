"""TrainJob (Kubeflow Trainer v2, v1alpha1) and the NetworkPolicy: the same pod in another frame.

The runtime injects PET_*; the pod's own parts (volumes, security, affinity) travel in a `runtimePatch`.
"""

from __future__ import annotations

from lockstep.jobs.kubernetes import pod
from lockstep.jobs.kubernetes.code import RENDERED
from lockstep.jobs.kubernetes.pytorchjob import metadata, network_policy
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.manifest import Manifest, merge, without_none
from lockstep.jobs.spec.model import JobSpec

API_VERSION = "trainer.kubeflow.org/v1alpha1"
CONTAINER = "node"
"""The runtime's name for the trainer's container."""


def render(spec: JobSpec, submission: str = RENDERED) -> list[Manifest]:
    """[NetworkPolicy, TrainJob]."""
    return [network_policy(spec), merge(job(spec, submission), k8s(spec).patch)]


def job(spec: JobSpec, submission: str = RENDERED) -> Manifest:
    """The TrainJob without `patch`."""
    container = pod.container(spec)
    template = pod.pod_spec(spec, submission)
    own = {
        "name": CONTAINER,
        "volumeMounts": container["volumeMounts"],
        "securityContext": container["securityContext"],
    }
    allowed = (
        "serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "imagePullSecrets",
        "securityContext", "terminationGracePeriodSeconds",
    )  # fmt: skip
    pod_patch = {key: template[key] for key in allowed if key in template} | {"containers": [own]}
    patch = {"metadata": {"labels": pod.labels(spec), "annotations": pod.pod_annotations(spec)}, "spec": pod_patch}
    node = {"name": CONTAINER, "template": {"spec": {"template": patch}}}
    return {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": metadata(spec, submission),
        "spec": without_none(
            {
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
        ),
    }
