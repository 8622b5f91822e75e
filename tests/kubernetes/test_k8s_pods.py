"""What becomes of a job's pods and nodes, and what lockstep says of it. Seen on Kubernetes 1.36."""

from __future__ import annotations

from typing import Any

import pytest
from k8s_admission import Refused
from k8s_cluster import Cluster
from k8s_nodes import Nodes
from k8s_operator import Operator

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Status, Unreachable
from lockstep.training.contract import UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"master": True}}
)  # fmt: skip
OTHER = SPEC.model_copy(update={"nodes": 3})
pytestmark = pytest.mark.usefixtures("rights")
"""Everything here is done with the rights of deploy/k8s/base alone."""


@pytest.fixture
def nodes(cluster: Cluster, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two nodes. The backend lives by their clock, with its own patience."""
    found = Nodes(cluster, "node-0", "node-1")
    backend.interval, backend.lost_after = 10.0, 300.0
    monkeypatch.setattr("lockstep.jobs.backend.time", found.clock)
    monkeypatch.setattr("lockstep.jobs.kubernetes.backend.time", found.clock)
    monkeypatch.setattr(backend, "pause", lambda job, seconds: found.clock.sleep(min(seconds, backend.interval)))
    return found


def pod(cluster: Cluster, name: str = "smoke-master-0", phase: str = "Running", **more: Any) -> dict[str, Any]:
    """A pod as the operator and the kubelet leave it; `meta_…` goes into its metadata, the rest into its status."""
    meta = {key.removeprefix("meta_"): value for key, value in more.items() if key.startswith("meta_")}
    status = {key: value for key, value in more.items() if not key.startswith("meta_")}
    labels = {"lockstep/job": "smoke"}
    spec = {} if phase == "Pending" else {"nodeName": "node-7"}
    item = {"metadata": {"name": name, "labels": labels, **meta}, "spec": spec, "status": {"phase": phase, **status}}
    return cluster.put("pods", item)


def ended_with(code: int, reason: str = "Error") -> list[dict[str, Any]]:
    return [{"name": "pytorch", "restartCount": 0, "state": {"terminated": {"exitCode": code, "reason": reason}}}]


# Nodes that die.


@pytest.mark.parametrize("reason", ["NodeNotReady", ""], ids=["with a reason", "without one"])
def test_a_node_that_dies_is_named_and_then_lost(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, nodes: Nodes, reason: str
) -> None:
    """Its pods keep the phase Running; that they are marked for deletion after five minutes changes nothing."""
    nodes.reason = reason
    backend.submit(SPEC)
    operator.round()
    nodes.die("node-1")
    nodes.clock.sleep(nodes.grace - 1)
    assert backend.status("smoke").reason == "2/2 pods run", "nobody knows yet"
    nodes.clock.sleep(1)
    found, silent = backend.status("smoke"), nodes.clock.now
    assert (found.state, found.reason) == ("running", "the node node-1 of smoke-worker-0 does not answer"), found
    assert [part.state for part in found.ranks] == ["running", "unknown"]
    found = backend.wait("smoke", 3600)
    assert (found.state, found.code) == ("lost", 4) and "node-1" in found.reason and "(for 300 s)" in found.reason, (
        found
    )
    assert 300 <= nodes.clock.now - silent <= 300 + backend.interval, "within the five minutes that the docs promise"
    evicted = cluster.get("pods", "smoke-worker-0")
    assert evicted is not None and evicted["metadata"]["deletionTimestamp"], "the taint manager was there, too"


def test_a_node_that_comes_back_in_time_is_forgiven(
    backend: KubernetesBackend, operator: Operator, nodes: Nodes
) -> None:
    """Each silence has its own five minutes."""
    backend.submit(SPEC)
    operator.round()
    began, reasons = nodes.clock.now, []

    def seen(status: Status) -> None:
        reasons.append(status.reason)
        third = int(nodes.clock.now - began) // 200
        (nodes.come_back if third % 2 else nodes.die)("node-1")

    assert backend.wait("smoke", 600, seen).state == "running"
    silent = "the node node-1 of smoke-worker-0 does not answer"
    assert [one for at, one in enumerate(reasons) if one != reasons[at - 1]].count(silent) >= 2 and len(
        set(reasons)
    ) == 2


def test_a_pod_that_never_started_on_a_dead_node_is_named_when_it_should_have_gone(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """Nobody takes `Ready` from a pod that has not had it: only its deletion, which never ends, tells."""
    backend.submit(SPEC)
    operator.round()
    worker = cluster.get("pods", "smoke-worker-0")
    waiting = [{"name": "pytorch", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}]
    cluster.put("pods", {**worker, "status": {"phase": "Pending", "containerStatuses": waiting}})  # type: ignore[dict-item]
    nodes.die("node-1")
    nodes.clock.sleep(nodes.grace + 300 + SPEC.grace_seconds)
    assert backend.status("smoke").reason == "1/2 pods run, the others are starting"
    nodes.clock.sleep(120)
    assert "node-1 of smoke-worker-0 does not answer: the pod should have ended" in backend.status("smoke").reason
    assert backend.wait("smoke", 3600).state == "lost"


def test_a_pod_that_ends_in_its_grace_is_not_called_silent(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """A taint that somebody puts on a node that answers."""
    backend.submit(SPEC)
    operator.round()
    nodes.drain("node-1")
    assert cluster.get("pods", "smoke-worker-0")["metadata"]["deletionTimestamp"]  # type: ignore[index]
    assert backend.status("smoke").reason == "2/2 pods run"


# Pods that are refused.

REFUSALS = {
    "quota of pods": (
        "resourcequotas", {"hard": {"pods": "1"}},
        "exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1",
    ),
    "quota of memory": (
        "resourcequotas", {"hard": {"limits.memory": "5Gi", "pods": "9"}},
        "exceeded quota: small, requested: limits.memory=4Gi, used: limits.memory=4Gi, limited: limits.memory=5Gi",
    ),
    "limit of a container": (  # the operator's own
        "limitranges", {"limits": [{"type": "Container", "min": {"cpu": "500m"}}]},
        "minimum cpu usage per Container is 500m, but request is 50m",
    ),
    "several limits": (
        "limitranges", {"limits": [{"type": "Container", "min": {"cpu": "1", "memory": "1Gi"}}]},
        "[minimum cpu usage per Container is 1, but request is 50m, minimum memory usage per Container is 1Gi, but request is 10Mi]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_pod_that_is_refused_is_told_although_others_run(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, refusal: tuple[str, dict[str, Any], str]
) -> None:
    """The job has no condition of it, and the operator goes on trying: once the namespace lets the pod in, it is told no more."""
    plural, spec, sentence = refusal
    cluster.put(plural, {"metadata": {"name": "small"}, "spec": spec})
    backend.submit(SPEC)
    operator.round()
    told = f'1/2 pods run, the others are refused: pods "smoke-worker-0" is forbidden: {sentence}'
    assert (found := backend.wait("smoke", 0.1)).state == "pending" and found.reason == told, found
    cluster.remove(plural, "small")
    operator.round()
    assert backend.status("smoke").reason == "2/2 pods run"


def test_a_refusal_that_is_over_is_not_told(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """All pods are refused, then one is let in, and the other is on its way."""
    operator.now = nodes.clock.time
    limits = {"limits": [{"type": "Pod", "max": {"memory": "1Gi"}}]}
    cluster.put("limitranges", {"metadata": {"name": "small"}, "spec": limits})
    backend.submit(SPEC)
    operator.round()
    found = backend.status("smoke")
    assert found.state == "pending" and "maximum memory usage per Pod is 1Gi, but limit is 4Gi" in found.reason, found
    cluster.remove("limitranges", "small")
    nodes.clock.sleep(60)
    operator.held.add("smoke-worker-0")
    operator.round()
    assert backend.status("smoke").reason == "1/2 pods run, the others are starting"


def test_a_job_that_the_quota_refuses_leaves_nothing_behind(backend: KubernetesBackend, cluster: Cluster) -> None:
    """Of jobs there are quotas, too: the policy would stay without one."""
    cluster.put(
        "resourcequotas", {"metadata": {"name": "jobs"}, "spec": {"hard": {"count/pytorchjobs.kubeflow.org": "1"}}}
    )
    backend.submit(SPEC)
    with pytest.raises(
        UserError, match="the namespace's quota does not allow it: .*exceeded quota: jobs, requested: count/"
    ) as error:
        backend.submit(SPEC.model_copy(update={"name": "second"}))
    assert not isinstance(error.value, Unreachable)
    assert [item["metadata"]["labels"]["lockstep/job"] for item in cluster.all("networkpolicies")] == ["smoke"]


def test_the_defaults_of_a_limit_range_are_filled_in(cluster: Cluster) -> None:
    """As a real server does before its quota looks: else a quota of memory refuses a container that says nothing of it."""
    bare = {"metadata": {"name": "bare"}, "spec": {"containers": [{"name": "one"}]}}
    cluster.put("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"limits.memory": "1Gi"}}})
    with pytest.raises(Refused, match="failed quota: small: must specify limits.memory for: one"):
        cluster.create("pods", bare)
    row = {"type": "Container", "default": {"memory": "512Mi"}, "defaultRequest": {"cpu": "100m"}}
    cluster.put("limitranges", {"metadata": {"name": "defaults"}, "spec": {"limits": [row]}})
    (container,) = cluster.create("pods", bare)["spec"]["containers"]
    assert container["resources"] == {"limits": {"memory": "512Mi"}, "requests": {"cpu": "100m"}}


def test_events_of_an_earlier_job_of_the_name_do_not_count(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator
) -> None:
    cluster.put("resourcequotas", {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "0"}}})
    backend.submit(SPEC)
    operator.round()
    assert "exceeded quota" in backend.status("smoke").reason
    backend.cancel("smoke")
    backend.submit(SPEC)
    assert "no pods yet" in backend.status("smoke").reason


# Pods that have failed.


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"containerStatuses": ended_with(1)}, "smoke-worker-0 ended with exit code 1: see"),
        ({"containerStatuses": ended_with(137, "OOMKilled")}, "smoke-worker-0 was killed for memory (OOMKilled)"),
        ({"initContainerStatuses": [{**ended_with(3)[0], "name": "init-pytorch"}]}, "exit code 3 in init-pytorch"),
        (
            {"reason": "Evicted", "message": "low on memory", "containerStatuses": ended_with(137)},
            "smoke-worker-0 was evicted: low on memory",
        ),
    ],
    ids=["crashed", "out of memory", "init container", "evicted"],
)
def test_a_failed_pod_is_named_before_and_after_the_job_has_failed(
    backend: KubernetesBackend, cluster: Cluster, broken: dict[str, Any], sentence: str
) -> None:
    """The operator replaces it, or says that the job has failed, seconds to minutes later."""
    backend.submit(SPEC)
    pod(cluster)
    pod(cluster, "smoke-worker-0", "Failed", **broken)
    found = backend.status("smoke")
    assert found.state == "restarting" and sentence in found.reason, found
    job = cluster.get("pytorchjobs", "smoke")
    cluster.put(
        "pytorchjobs", {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "message": "x"}]}}
    )  # type: ignore[dict-item]
    found = backend.status("smoke")
    assert found.state == "failed" and sentence in found.reason, found


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        ({"containerStatuses": ended_with(143, "OOMKilled")}, "failed", 1),
        ({"containerStatuses": ended_with(2, "OOMKilled")}, "failed", 1),
        ({"reason": "Evicted", "message": "low", "containerStatuses": ended_with(143)}, "preempted", 75),
        ({"containerStatuses": ended_with(2)}, "failed", 2),
    ],
    ids=["memory, 143", "memory, 2", "evicted and saved", "wrong usage"],
)
def test_what_a_pod_died_of_and_whether_it_saved(
    backend: KubernetesBackend, cluster: Cluster, end: dict[str, Any], state: str, code: int
) -> None:
    backend.submit(SPEC)
    pod(cluster, "smoke-master-0", "Succeeded", containerStatuses=ended_with(0, "OOMKilled"))
    pod(cluster, "smoke-worker-0", "Failed", **end)
    job = cluster.get("pytorchjobs", "smoke")
    cluster.put(
        "pytorchjobs", {**job, "status": {"conditions": [{"type": "Failed", "status": "True", "message": "x"}]}}
    )  # type: ignore[dict-item]
    found = backend.status("smoke")
    assert (found.state, found.code) == (state, code) and "smoke-worker-0" in found.reason, found


def test_pods_that_were_replaced_and_sidecars_are_no_news(backend: KubernetesBackend, cluster: Cluster) -> None:
    """A batch Job keeps failed pods beside those that replace them."""
    backend.submit(SPEC)
    sidecar = [{"name": "proxy", "restartCount": 0, "state": {"terminated": {"exitCode": 1}}}]
    pod(cluster, containerStatuses=sidecar)
    for name, phase, made in (
        ("smoke-old", "Failed", "2026-01-01T00:00:01Z"),
        ("smoke-new", "Running", "2026-01-01T00:09:00Z"),
    ):
        item = pod(
            cluster,
            name,
            phase,
            meta_creationTimestamp=made,
            containerStatuses=ended_with(137) if phase == "Failed" else [],
        )
        cluster.put("pods", {**item, "spec": {**item["spec"], "hostname": "smoke-worker-0"}})
    assert (backend.status("smoke").state, backend.status("smoke").reason) == ("running", "2/2 pods run")


def test_a_restart_loop_says_what_it_dies_of(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    pod(cluster, containerStatuses=[{"name": "pytorch", "restartCount": 4, "state": waiting, "lastState": last}])
    assert "killed for memory again and again (OOMKilled)" in backend.status("smoke").reason


def test_what_is_placed_is_what_has_a_node(backend: KubernetesBackend, cluster: Cluster) -> None:
    """Two of three have one, and have not started."""
    backend.submit(OTHER)
    scheduled = {"type": "PodScheduled", "status": "True"}
    pod(cluster, "smoke-master-0", "Pending", conditions=[scheduled])
    pod(cluster, "smoke-worker-0", "Pending", conditions=[scheduled])
    never = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    pod(cluster, "smoke-worker-1", "Pending", conditions=[never])
    assert backend.status("smoke").reason == "2/3 pods are placed: 0/3 nodes are available"


@pytest.mark.parametrize(
    ("name", "message", "state"),
    [
        ("deadline-test", "Job deadline-test has failed because it has reached the specified backoff limit", "failed"),
        ("smoke", "Job smoke has failed because it was active longer than specified deadline", "timed_out"),
        ("longer", "PyTorchJob longer is failing because 1 Worker replica(s) failed: deadline", "failed"),
    ],
)
def test_a_jobs_name_is_no_reason(
    backend: KubernetesBackend, cluster: Cluster, name: str, message: str, state: str
) -> None:
    backend.submit(SPEC.model_copy(update={"name": name}))
    job = cluster.get("pytorchjobs", name)
    failed = {"type": "Failed", "status": "True", "message": message, "reason": "PyTorchJobFailed"}
    cluster.put("pytorchjobs", {**job, "status": {"conditions": [failed]}})  # type: ignore[dict-item]
    assert backend.status(name).state == state
    assert backend.list()[0].state == state
