"""A job that an earlier version submitted: its annotation holds what was set alone, and the defaults were others."""

from __future__ import annotations

import json

import pytest
from k8s_cluster import Cluster

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.kubernetes.render import kubernetes
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError

PLAIN = {"name": "old", "recipe": "smoke", "image": "registry.example/a:1", "nodes": 2, "ranks_per_node": 2, "gpus": 2}


@pytest.fixture
def old(cluster: Cluster) -> JobSpec:
    """The job as version 1 made it, with a Master, 2 cores and 4 GiB."""
    before = JobSpec.of({**PLAIN, "cpus": 2, "memory": "4Gi", "k8s": {"master": True}, "slurm": {"wckey": "lockstep"}})
    _, job = kubernetes(before)
    job["metadata"]["annotations"]["lockstep/spec"] = json.dumps(PLAIN)
    cluster.put("pytorchjobs", job)
    for number, name in enumerate(("old-master-0", "old-worker-0")):
        status = {"phase": "Running", "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}]}
        cluster.put("pods", {"metadata": {"name": name, "labels": {"lockstep/job": "old"}}, "status": status})
        cluster.logs[name] = [
            f"2026-01-01T00:00:00Z [rank {2 * number + rank}] rank {2 * number + rank}" for rank in (0, 1)
        ]
    return before


def test_its_ranks_are_those_of_the_object(backend: KubernetesBackend, cluster: Cluster, old: JobSpec) -> None:
    found = backend.require("old")
    assert found.spec == old, "without a version it is read with the defaults of then"
    ranks = {part.name: part.ranks for part in backend.status("old").ranks}
    assert ranks == {"old-master-0": [0, 1], "old-worker-0": [2, 3]}
    assert list(backend.logs("old", rank=3)) == ["rank 3"]


def test_what_has_changed_is_told_by_name(backend: KubernetesBackend, cluster: Cluster, old: JobSpec) -> None:
    with pytest.raises(UserError) as refused:
        backend.submit(JobSpec.of(PLAIN))
    told = str(refused.value)
    assert "cpus: 2.0 → 8.0" in told and "memory: 4Gi → 32Gi" in told and "k8s.master: True → False" in told
    assert not backend.submit(old).created, "as it was, it is the same job"
    assert cluster.get("networkpolicies", f"old-{old.hash()}") is not None, "it had none, and got it back"


def test_a_default_alone_that_has_changed_is_another_spec(
    backend: KubernetesBackend, cluster: Cluster, old: JobSpec
) -> None:
    same = {**PLAIN, "cpus": 2, "memory": "4Gi"}  # its hash is that of the job as it stands
    with pytest.raises(UserError, match=r"another spec .*k8s.master: True → False"):
        backend.submit(JobSpec.of(same))
    assert not backend.submit(JobSpec.of({**same, "k8s": {"master": True}})).created, "whatever SLURM's default was"
    policies = [name for plural, _, name in cluster.objects if plural == "networkpolicies"]
    assert policies == [], "one by another hash would select none of its pods"


def test_a_later_versions_job_is_left_alone(backend: KubernetesBackend, cluster: Cluster, old: JobSpec) -> None:
    live = cluster.get("pytorchjobs", "old")
    assert live is not None
    live["metadata"]["annotations"]["lockstep/spec"] = json.dumps({**old.record(), "version": 99})
    cluster.put("pytorchjobs", live)
    assert [part.name for part in backend.status("old").ranks] == ["old-master-0", "old-worker-0"]
    assert [row.name for row in backend.list()] == ["old"]
