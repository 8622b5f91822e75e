"""Every sentence of `status`, provoked once, and the logs of a rank through Pending, restarts and broken streams."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_operator import until

from lockstep.jobs.kubernetes import observe
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.kubernetes.observe import slim
from lockstep.jobs.manifest import get
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"master": True}}
)  # fmt: skip
UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


def pod(cluster: Cluster, name: str = "smoke-master-0", phase: str = "Pending", **status: Any) -> None:
    item = {
        "metadata": {"name": name, "labels": {"lockstep/job": "smoke"}},
        "spec": {},
        "status": {"phase": phase, **status},
    }
    cluster.put("pods", item)


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "pytorch", "image": "registry.example/lockstep:1", "restartCount": 0, "state": state}]


def condition(cluster: Cluster, *conditions: dict[str, str]) -> None:
    job = cluster.get("pytorchjobs", "smoke")
    assert job is not None
    cluster.put("pytorchjobs", {**job, "status": {"conditions": list(conditions)}})


def failed(message: str = "job is failing", reason: str = "") -> dict[str, str]:
    return {"type": "Failed", "status": "True", "message": message, "reason": reason}


def event(cluster: Cluster, about: str, reason: str, message: str, kind: str = "Warning") -> None:
    name = f"{about}.{reason}".lower()
    involved = {"name": about}
    cluster.put(
        "events",
        {"metadata": {"name": name}, "involvedObject": involved, "reason": reason, "message": message, "type": kind},
    )


def no_pods(cluster: Cluster) -> None:
    pass


def refused_pods(cluster: Cluster) -> None:
    event(cluster, "smoke", "FailedCreatePod", 'pods "smoke-master-0" is forbidden: exceeded quota')


def unschedulable(cluster: Cluster) -> None:
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
    pod(cluster, conditions=[scheduled])


def unschedulable_event(cluster: Cluster) -> None:
    pod(cluster)
    event(cluster, "smoke-master-0", "FailedScheduling", UNSCHEDULABLE)


def bad_image(cluster: Cluster) -> None:
    waiting = {"reason": "ImagePullBackOff", "message": "no such host"}
    pod(cluster, containerStatuses=container(waiting=waiting))


def bad_init_image(cluster: Cluster) -> None:
    waiting = {"reason": "ErrImagePull", "message": "dial tcp: i/o timeout"}
    status = [{"name": "init-pytorch", "image": "alpine:3.10", "restartCount": 0, "state": {"waiting": waiting}}]
    pod(cluster, "smoke-worker-0", initContainerStatuses=status)


def no_secret(cluster: Cluster) -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "wandb" not found'}
    pod(cluster, containerStatuses=container(waiting=waiting))


def no_volume(cluster: Cluster) -> None:
    pod(cluster, conditions=[{"type": "PodScheduled", "status": "True"}])
    event(cluster, "smoke-master-0", "FailedMount", "MountVolume.SetUp failed: timed out")


def running(cluster: Cluster) -> None:
    pod(cluster, "smoke-master-0", "Running", containerStatuses=container(running={}))
    pod(cluster, "smoke-worker-0", "Running", containerStatuses=container(running={}))


def half(cluster: Cluster) -> None:
    pod(cluster, "smoke-master-0", "Running", containerStatuses=container(running={}))


def restarting(cluster: Cluster) -> None:
    half(cluster)
    condition(cluster, {"type": "Restarting", "status": "True", "message": "Worker replica(s) failed."})


def after_restart(cluster: Cluster) -> None:
    """Conditions linger with status False."""
    running(cluster)
    condition(cluster, {"type": "Restarting", "status": "False"}, {"type": "Failed", "status": "False"})


def succeeded(cluster: Cluster) -> None:
    condition(cluster, {"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"})


def crashed(cluster: Cluster) -> None:
    pod(cluster, phase="Failed", containerStatuses=container(terminated={"exitCode": 1}))
    condition(cluster, failed())


def out_of_memory(cluster: Cluster) -> None:
    pod(cluster, phase="Failed", containerStatuses=container(terminated={"exitCode": 137, "reason": "OOMKilled"}))
    condition(cluster, failed())


def wrong_usage(cluster: Cluster) -> None:
    pod(cluster, phase="Failed", containerStatuses=container(terminated={"exitCode": 2}))
    condition(cluster, failed())


def preempted(cluster: Cluster) -> None:
    pod(cluster, phase="Failed", containerStatuses=container(terminated={"exitCode": 143}))
    condition(cluster, failed())


def evicted(cluster: Cluster) -> None:
    pod(cluster, phase="Failed", reason="Evicted", message="The node was low on resource: memory")
    condition(cluster, failed())


def deadline(cluster: Cluster) -> None:
    condition(cluster, failed("Job smoke has failed because it was active longer than specified deadline"))


def backoff(cluster: Cluster) -> None:
    condition(cluster, failed("Job smoke has failed because it has reached the specified backoff limit"))


def suspended(cluster: Cluster) -> None:
    condition(cluster, {"type": "Suspended", "status": "True"})


@pytest.mark.parametrize(
    ("arrange", "state", "sentence", "code"),
    [
        (no_pods, "pending", "no pods yet: is the operator running?", 0),
        (refused_pods, "pending", "exceeded quota", 0),
        (unschedulable, "unschedulable", f"0/2 pods are placed: {UNSCHEDULABLE}", 3),
        (unschedulable_event, "unschedulable", UNSCHEDULABLE, 3),
        (bad_image, "pending", "image pull failed: registry.example/lockstep:1 on smoke-master-0: no such host", 0),
        (bad_init_image, "pending", "image pull failed: alpine:3.10 on smoke-worker-0: dial tcp: i/o timeout", 0),
        (no_secret, "pending", 'smoke-master-0 cannot start: secret "wandb" not found', 0),
        (no_volume, "pending", "smoke-master-0: MountVolume.SetUp failed: timed out", 0),
        (running, "running", "2/2 pods run", 0),
        (half, "pending", "1/2 pods run, the others are starting", 0),
        (restarting, "restarting", "Worker replica(s) failed.", 0),
        (after_restart, "running", "2/2 pods run", 0),
        (succeeded, "succeeded", "", 0),
        (crashed, "failed", "smoke-master-0 ended with exit code 1", 1),
        (out_of_memory, "failed", "killed for memory (OOMKilled): raise memory", 1),
        (wrong_usage, "failed", "wrong usage, config or data (exit code 2)", 2),
        (preempted, "preempted", "submit it again to resume", 75),
        (evicted, "failed", "smoke-master-0 was evicted: The node was low on resource: memory", 1),
        (deadline, "timed_out", "the time limit is over", 124),
        (backoff, "failed", "all restarts are used up", 1),
        (suspended, "queued", "suspended", 0),
    ],
)
def test_status_says_why(
    backend: KubernetesBackend, cluster: Cluster, arrange: Any, state: str, sentence: str, code: int
) -> None:
    backend.submit(SPEC)
    arrange(cluster)
    found = backend.status("smoke")
    assert (found.state, found.code) == (state, code), found
    assert sentence in found.reason


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_kueue_says_which_queue(backend: KubernetesBackend, cluster: Cluster, version: str) -> None:
    spec = SPEC.model_copy(update={"k8s": SPEC.k8s.model_copy(update={"queue": "gpu"})})
    backend.submit(spec)
    if version == "v1beta1":
        cluster.faults.append(Fault("GET", "kueue.x-k8s.io/v1beta2", status=404, times=9))
    uid = cluster.get("pytorchjobs", "smoke")["metadata"]["uid"]  # type: ignore[index]
    quota = {
        "type": "QuotaReserved",
        "status": "False",
        "message": "insufficient unused quota for nvidia.com/gpu, 4 more needed",
    }
    workload = {
        "metadata": {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": uid}},
        "spec": {"queueName": "gpu"},
        "status": {"conditions": [quota]},
    }
    cluster.put("workloads", workload)
    found = backend.status("smoke")
    assert found.state == "queued"
    assert found.reason == "waiting for quota in queue gpu: insufficient unused quota for nvidia.com/gpu, 4 more needed"
    workload["status"]["conditions"] = [{"type": "Preempted", "status": "True", "message": "by a higher priority"}]  # type: ignore[index]
    cluster.put("workloads", workload)
    assert "waiting in queue gpu after preemption: by a higher priority" in backend.status("smoke").reason
    workload["status"]["conditions"] = [{"type": "Admitted", "status": "True"}]  # type: ignore[index]
    cluster.put("workloads", workload)
    assert backend.status("smoke").state == "pending"


def test_ranks_follow_the_names_of_the_pods_as_text(backend: KubernetesBackend, cluster: Cluster) -> None:
    """The rendezvous sorts its nodes by name: worker-10 comes before worker-2."""
    backend.submit(SPEC.model_copy(update={"nodes": 12, "ranks_per_node": 1}))
    for name in ["smoke-master-0", *(f"smoke-worker-{index}" for index in range(11))]:
        pod(cluster, name, "Running", containerStatuses=container(running={}))
    ranks = {part.name: part.ranks for part in backend.status("smoke").ranks}
    assert ranks["smoke-master-0"] == [0]
    assert ranks["smoke-worker-1"] == [2] and ranks["smoke-worker-10"] == [3] and ranks["smoke-worker-2"] == [4]


def stamped(*lines: str, minute: int = 0) -> list[str]:
    return [f"2026-01-01T00:{minute:02d}:00.{number:09d}Z {line}" for number, line in enumerate(lines, 1)]


def test_logs_of_a_rank_come_from_its_pod(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    running(cluster)
    cluster.logs["smoke-master-0"] = stamped("[rank 0] zero", "[rank 1] one", "launch: joined")
    cluster.logs["smoke-worker-0"] = stamped("[rank 2] two", "[rank 3] three")
    assert list(backend.logs("smoke", rank=3)) == ["three"]
    assert list(backend.logs("smoke")) == [
        "[rank 0] zero", "[rank 1] one", "[smoke-master-0] launch: joined", "[rank 2] two", "[rank 3] three",
    ]  # fmt: skip
    with pytest.raises(UserError, match="has the ranks 0 … 3, got 4"):
        backend.logs("smoke", rank=4)
    asked = [path for _, path, _, _ in cluster.requests if path.endswith("/log")]
    assert asked[0].endswith("smoke-worker-0/log") and len(asked) == 3


def test_an_elastic_rank_is_found_wherever_it_is(backend: KubernetesBackend, cluster: Cluster) -> None:
    spec = JobSpec(
        name="smoke", recipe="smoke", image="registry.example/a:1", nodes=2, ranks_per_node=1, elastic={"min_nodes": 1, "max_nodes": 2},
        volumes=[{"claim": "runs", "path": "/runs"}],
    )  # fmt: skip
    backend.submit(spec)
    for index, rank in ((0, 1), (1, 0)):
        pod(cluster, f"smoke-worker-{index}", "Running", containerStatuses=container(running={}))
        cluster.logs[f"smoke-worker-{index}"] = stamped(f"[rank {rank}] I am {rank}")
    assert list(backend.logs("smoke", rank=0)) == ["I am 0"]


def test_logs_follow_through_pending_a_dropped_stream_and_a_restart(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    backend.submit(SPEC)
    pod(cluster)
    cluster.faults.append(Fault("GET", "/log", drop_after_lines=2))
    script: list[Any] = [
        lambda: (cluster.logs.__setitem__("smoke-master-0", stamped("[rank 0] a", "[rank 0] b", "[rank 0] c")),
                 pod(cluster, phase="Running")),
        lambda: cluster.remove("pods", "smoke-master-0"),
        lambda: (cluster.logs.__setitem__("smoke-master-0", stamped("[rank 0] d", "[rank 1] x", "[rank 0] e", minute=1)),
                 pod(cluster, phase="Running")),
    ]  # fmt: skip
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.extend(backend.logs("smoke", rank=0, follow=True)), daemon=True)
    thread.start()
    script[0]()
    until(lambda: seen == ["a", "b", "c"], 20, f"the first pod's lines; {seen}")
    script[1]()
    script[2]()
    until(lambda: seen == ["a", "b", "c", "d", "e"], 20, f"the second pod's lines; {seen}")
    live = cluster.get("pods", "smoke-master-0")
    assert live is not None
    cluster.put("pods", {**live, "status": {"phase": "Succeeded"}})
    condition(cluster, {"type": "Succeeded", "status": "True"})
    thread.join(20)
    assert not thread.is_alive(), "following must end with the job"
    assert seen == ["a", "b", "c", "d", "e"], "no line twice, none missing"


def _pod(job: str, index: int, phase: str = "Running") -> dict[str, Any]:
    """A pod of a PyTorchJob as an API server gives it: about 6 kB, most of which nobody asks for."""
    name = f"{job}-master-0" if index == 0 else f"{job}-worker-{index - 1}"
    fields = {f"f:field-{number}": {"f:value": {}} for number in range(60)}
    env = [{"name": f"VARIABLE_{number}", "value": f"value-{number}"} for number in range(40)]
    container = {
        "name": "pytorch",
        "image": "registry.example/lockstep:1",
        "env": env,
        "command": ["python", "-m", "lockstep.training"],
    }
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}} if phase == "Running" else {"waiting": {}}
    return {
        "metadata": {"name": name, "labels": {"lockstep/job": job}, "creationTimestamp": "2026-01-01T00:00:00Z",
                     "managedFields": [{"manager": "kubelet", "fieldsV1": fields}]},
        "spec": {"containers": [container], "nodeName": f"node-{index}"},
        "status": {"phase": phase, "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
                   "containerStatuses": [{"name": "pytorch", "restartCount": 0, "state": state}]},
    }  # fmt: skip


def test_ten_thousand_pods(cluster: Cluster, backend: KubernetesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a pod is looked up, not searched for; one rank's log asks for its pod alone."""
    count = 10_000
    spec = JobSpec.of({"name": "large", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": count})
    job = {
        "metadata": {"name": "large", "annotations": {"lockstep/spec": json.dumps(spec.record())}},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": count - 1}}},
    }
    cluster.put("pytorchjobs", job)
    for index in range(count):
        pod = slim(_pod("large", index, "Pending" if index == 5 else "Running"))
        cluster.objects[("pods", "team", pod["metadata"]["name"])] = {**pod, "kind": "Pod"}
        pod["metadata"].update(uid=f"pod-{index}", namespace="team", resourceVersion="1")
    for number in range(400):
        about = {"name": "large", "uid": cluster.get("pytorchjobs", "large")["metadata"]["uid"]}
        cluster.put("events", {"metadata": {"name": f"e{number}"}, "involvedObject": about, "reason": "Note"})
    looks = [0]

    def counted(*place: Any) -> Any:
        looks[0] += 1
        return get(*place)

    monkeypatch.setattr(observe, "get", counted)
    status = backend.status("large")
    assert looks[0] < 150 * count  # a search in all pods for each event is 400 more for each
    assert len(status.ranks) == count and status.state == "pending"
    rank = observe.hosts({**job, "kind": "PyTorchJob"}).index("large-worker-9")
    cluster.logs["large-worker-9"] = [f"2026-01-01T00:00:00.000000000Z [rank {rank}] rank {rank} says"]
    cluster.requests.clear()
    assert [*backend.logs("large", rank)] == [*backend.logs("large", rank, last=5)] == [f"rank {rank} says"]
    assert [path for _, path, _, _ in cluster.requests if path.endswith("/pods")] == []
