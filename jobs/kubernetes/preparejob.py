"""`lockstep prepare`: one pod that writes a recipe's shards onto the data volume."""

from __future__ import annotations

from lockstep.jobs import command as commands
from lockstep.jobs.kubernetes import pod
from lockstep.jobs.kubernetes.section import k8s
from lockstep.jobs.manifest import HASH, Manifest, holds, without_none
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError


def render(spec: JobSpec) -> list[Manifest]:
    """[Job]. Raises `UserError` for a spec without shards, or no volume to write them to."""
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
    return [
        {
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
                            "onExitCodes": {"containerName": pod.CONTAINER, "operator": "In", "values": [2]},
                        }
                    ]
                },
                "template": {
                    "metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}},
                    "spec": {**template, "restartPolicy": "Never", "containers": [container]},
                },
            },
        }
    ]
