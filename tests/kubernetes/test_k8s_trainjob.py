"""TrainJob beside PyTorchJob: the same commands, other names and conditions."""

from __future__ import annotations

from typing import Any

from k8s_cluster import Cluster

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec

SPEC = JobSpec.of(
    {
        "name": "second",
        "recipe": "smoke",
        "image": "registry.example/a:1",
        "nodes": 2,
        "ranks_per_node": 2,
        "k8s": {"kind": "TrainJob"},
    }
)


def pod(cluster: Cluster, index: int, phase: str = "Running") -> None:
    host = f"second-node-0-{index}"
    labels = {"lockstep/job": "second", "batch.kubernetes.io/job-completion-index": str(index)}
    meta = {"name": f"{host}-x7k2p", "labels": labels}
    status: dict[str, Any] = {
        "phase": phase,
        "containerStatuses": [{"name": "node", "restartCount": 0, "state": {"running": {}}}],
    }
    cluster.put("pods", {"metadata": meta, "spec": {"hostname": host}, "status": status})
    cluster.logs[meta["name"]] = [
        f"2026-01-01T00:00:00Z [rank {2 * index + rank}] rank {2 * index + rank}" for rank in (0, 1)
    ]


def condition(cluster: Cluster, kind: str, **more: Any) -> None:
    job = cluster.get("trainjobs", "second")
    assert job is not None
    found = {"type": kind, "status": "True", "reason": kind, "message": "m"}
    cluster.put("trainjobs", {**job, "status": {"conditions": [found], **more}})


def test_a_trainjob_is_submitted_watched_and_read(backend: KubernetesBackend, cluster: Cluster) -> None:
    assert backend.submit(SPEC).created and not backend.submit(SPEC).created
    assert cluster.get("pytorchjobs", "second") is None
    policy = cluster.get("networkpolicies", f"second-{SPEC.hash()}")
    assert policy is not None and policy["metadata"]["ownerReferences"][0]["kind"] == "TrainJob"
    pod(cluster, 0)
    pod(cluster, 1)
    found = backend.status("second")
    assert found.state == "running"
    assert {part.name: part.ranks for part in found.ranks} == {
        "second-node-0-0-x7k2p": [0, 1], "second-node-0-1-x7k2p": [2, 3],
    }  # fmt: skip
    assert list(backend.logs("second", rank=3)) == ["rank 3"]
    cluster.unknown.add("pytorchjobs")
    assert [(row.name, row.nodes) for row in backend.list()] == [("second", 2)], "the other operator need not be there"
    cluster.unknown.clear()
    condition(cluster, "Suspended")
    assert backend.status("second").state == "queued"
    condition(cluster, "Complete")
    assert backend.wait("second", 5).state == "succeeded"
    condition(cluster, "Failed")
    assert backend.status("second").code == 1
    condition(cluster, "Running", jobsStatus=[{"name": "node", "active": 1}])
    assert backend.list()[0].state == "running"
    assert backend.cancel("second").state == "cancelled"
    assert cluster.get("trainjobs", "second") is None


def test_pods_that_are_refused_are_told(backend: KubernetesBackend, cluster: Cluster, rights: None) -> None:
    """The batch Job that makes them has the event, under a name and a uid of its own."""
    backend.submit(SPEC)
    pod(cluster, 0)
    template = {"metadata": {"labels": {"lockstep/job": "second"}}}
    made = cluster.put("jobs", {"metadata": {"name": "second-node-0"}, "spec": {"template": template}})
    about = {"kind": "Job", "name": "second-node-0", "uid": made["metadata"]["uid"]}
    refused = (
        'pods "second-node-0-1-" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1'
    )
    event = {
        "metadata": {"name": "e"},
        "reason": "FailedCreate",
        "type": "Warning",
        "message": f"Error creating: {refused}",
    }
    cluster.put("events", {**event, "involvedObject": about})
    assert backend.status("second").reason == f"1/2 pods run, the others are refused: {refused}"
    cluster.put("jobs", {**made, "spec": {}})
    assert "starting" in backend.status("second").reason, "a Job of somebody else that has the name"


def test_a_follower_reads_the_pod_that_replaced_a_failed_one(backend: KubernetesBackend, cluster: Cluster) -> None:
    """A batch Job keeps both, under one index."""
    backend.submit(SPEC)
    pod(cluster, 0, "Failed")
    pod(cluster, 1)
    new = cluster.get("pods", "second-node-0-0-x7k2p")
    assert new is not None
    meta = {
        **new["metadata"],
        "name": "second-node-0-0-zzzzz",
        "uid": "new",
        "creationTimestamp": "2026-01-02T00:00:00Z",
    }
    cluster.put("pods", {**new, "metadata": meta, "status": {**new["status"], "phase": "Running"}})
    old = cluster.get("pods", "second-node-0-0-x7k2p")
    assert old is not None
    cluster.put("pods", {**old, "metadata": {**old["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}})
    cluster.logs["second-node-0-0-zzzzz"] = ["2026-01-02T00:00:00Z [rank 0] of the new pod"]
    condition(cluster, "Complete")
    assert list(backend.logs("second", rank=0, follow=True)) == ["of the new pod"]
