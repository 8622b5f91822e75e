"""States of a job's pods and nodes, and the status that lockstep reports. Each state was observed on Kubernetes 1.36."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_nodes import Nodes
from k8s_operator import Operator, finish

from tests import product
from tests.product import JobSpec, Unreachable

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "localhost:5000/lockstep:1", "nodes": 2, "ranks_per_node": 2}
)
pytestmark = [pytest.mark.usefixtures("rights"), pytest.mark.promise("k8s-states")]
"""All tests here have only the rights of deploy/k8s/base."""
FAILED = {"type": "Failed", "message": "x"}
PLACED = {"type": "PodScheduled", "status": "True"}


def container(name: str = "pytorch", **state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": name, "image": "localhost:5000/a:1", "restartCount": 0, "state": state}]}


def waits(reason: str, message: str = "") -> dict[str, Any]:
    return {"phase": "Pending", **container(waiting={"reason": reason, "message": message})}


def unplaced(message: str) -> dict[str, Any]:
    never = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [never]}


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    return {"phase": "Failed", **container(terminated={"exitCode": code, "reason": reason})}


RUNS = {"phase": "Running", **container(running={})}
EVICTED = {"reason": "Evicted", "message": "low on memory"}
BOUND = "it has reached the specified backoff limit"
LIMIT = "it was active longer than specified deadline"
LOOPS = {"name": "pytorch", "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
         "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}  # fmt: skip
# The pods, the job's conditions, an event (object, reason, message) → state, exit code, words of the reason.
STATES: dict[str, tuple[list[dict[str, Any]], list[dict[str, str]], tuple[str, ...], str, int, tuple[str, ...]]] = {
    "no pods": ([], [], (), "pending", 0, ("operator",)),
    "placed": ([{"phase": "Pending", "conditions": [PLACED]}, unplaced("0/3")], [], (), "unschedulable", 3, ("1/2 pods", "0/3")),
    "by event": ([{"phase": "Pending"}], [], ("smoke-worker-0", "FailedScheduling", "0/9"), "unschedulable", 3, ("0/9",)),
    "secret": ([waits("CreateContainerConfigError", "no wandb")], [], (), "pending", 0, ("smoke-worker-0", "no wandb")),
    "volume": ([{"phase": "Pending", "conditions": [PLACED]}], [], ("smoke-worker-0", "FailedMount", "slow"), "pending", 0,
               ("smoke-worker-0", "slow")),
    "half": ([RUNS], [], (), "pending", 0, ("1/2 pods run",)),
    "sidecar": ([RUNS, {"phase": "Running", **container("proxy", terminated={"exitCode": 1})}], [], (), "running", 0, ("2/2",)),
    "loop": ([{"phase": "Running", "containerStatuses": [LOOPS]}], [], (), "pending", 0, ("OOMKilled",)),
    "silent": ([RUNS, {"phase": "Unknown"}], [], (), "running", 0, ("smoke-worker-1",)),
    "restarting": ([RUNS], [{"type": "Restarting", "message": "Worker"}], (), "restarting", 0, ("Worker",)),
    "conditions linger": ([RUNS, RUNS], [{"type": "Restarting", "status": "False"}, {**FAILED, "status": "False"}], (),
                          "running", 0, ("2/2 pods run",)),
    "succeeded": ([], [{"type": "Running", "status": "False"}, {"type": "Succeeded"}], (), "succeeded", 0, ("",)),
    "preempted": ([ended(143)], [FAILED], (), "preempted", 75, ("submit it again",)),
    "init container": ([{"phase": "Failed", "initContainerStatuses": container("first", terminated={"exitCode": 3})[
        "containerStatuses"]}], [FAILED], (), "failed", 1, ("exit code 3", "first")),
    "memory": ([ended(137, "OOMKilled")], [FAILED], (), "failed", 1, ("smoke-worker-0", "OOMKilled")),
    "memory, 143": ([ended(143, "OOMKilled")], [FAILED], (), "failed", 1, ("smoke-worker-0", "OOMKilled")),
    "evicted": ([ended(137) | EVICTED], [FAILED], (), "failed", 1, ("smoke-worker-0", "evicted", "low on memory")),
    "evicted and saved": ([ended(143) | EVICTED], [FAILED], (), "preempted", 75, ("smoke-worker-0",)),
    "time limit": ([], [{**FAILED, "message": f"Job smoke has failed because {LIMIT}"}], (), "timed_out", 124, ("time limit",)),
    "restarts": ([], [{**FAILED, "message": f"Job smoke has failed because {BOUND}"}], (), "failed", 1, ("restarts",)),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_status_says_why(backend: Any, cluster: Cluster, case: str) -> None:
    pods, conditions, event, state, code, words = STATES[case]
    backend.submit(SPEC)
    for number, pod_status in enumerate(pods):
        spec = {} if pod_status["phase"] == "Pending" else {"nodeName": f"node-{number}"}
        cluster.pod("smoke", f"smoke-worker-{number}", pod_status, spec=spec)
    if event:
        about = {"metadata": {"name": "e"}, "involvedObject": {"name": event[0]}, "type": "Warning"}
        cluster.put("events", {**about, "reason": event[1], "message": event[2]})
    if FAILED in conditions:  # the operator sets it, or replaces the pod, seconds to minutes later
        status = backend.status("smoke")
        assert status.state == "restarting" and "smoke-worker" in status.reason, status
    if conditions:
        cluster.set_conditions("smoke", *conditions)
    status = backend.status("smoke")
    assert (status.state, status.code) == (state, code) and all(word in status.reason for word in words), status


def test_kueue_says_which_queue(backend: Any, cluster: Cluster) -> None:
    """Kueue serves only v1beta1."""
    cluster.role = None
    backend.submit(JobSpec.of({**SPEC.plain(), "k8s": {"queue": "gpu"}}))
    cluster.faults.append(Fault("GET", "kueue.x-k8s.io/v1beta2", status=404, times=9))
    labels = {"kueue.x-k8s.io/job-uid": cluster.get("pytorchjobs", "smoke")["metadata"]["uid"]}
    cluster.put("workloads", {"metadata": {"name": "w", "labels": labels}, "spec": {"queueName": "gpu"}})
    for condition, state in (
        ({"type": "QuotaReserved", "status": "False", "message": "4 more needed"}, "queued"),
        ({"type": "Preempted", "message": "by a higher priority"}, "queued"),
        ({"type": "Admitted"}, "pending"),
    ):
        cluster.set_conditions("w", condition, plural="workloads")
        status = backend.status("smoke")
        assert status.state == state and (state == "pending" or f"{condition['message']}" in status.reason), status
        assert state == "pending" or "queue gpu" in status.reason
        if condition["type"] == "Preempted":  # the next condition lets it run
            cluster.change("pytorchjobs", "smoke", spec={"runPolicy": {}})


# Nodes that die.


@pytest.fixture
def nodes(cluster: Cluster, backend: Any, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Two nodes. The backend uses their clock."""
    nodes = Nodes(cluster, "node-0", "node-1")
    product.on_clock(backend, nodes.clock, monkeypatch)
    return nodes


def test_a_node_that_dies_is_named_and_then_lost(
    backend: Any, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """Pods of a dead node keep the phase Running, also when they are marked for deletion after five minutes."""
    backend.submit(SPEC)
    operator.round()
    nodes.die("node-1")
    nodes.clock.sleep(nodes.grace - 1)
    assert backend.status("smoke").reason == "2/2 pods run", "nobody knows yet"
    nodes.clock.sleep(1)
    status, silent_since = backend.status("smoke"), nodes.clock.now
    assert status.state == "running" and "node-1 of smoke-worker-1 does not answer" in status.reason, status
    assert [part.state for part in status.ranks] == ["running", "unknown"]
    status = backend.wait("smoke", 3600)
    assert (status.state, status.code) == ("lost", 4) and "node-1" in status.reason, status
    assert 300 <= nodes.clock.now - silent_since <= 300 + backend.interval, (
        "within the five minutes that the docs promise"
    )
    assert cluster.get("pods", "smoke-worker-1")["metadata"]["deletionTimestamp"], "the taint manager was there, too"


def test_a_pod_that_ends_in_its_grace_is_not_called_silent(
    backend: Any, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """A taint evicts the pod from a node that answers. Until its grace is over the pod counts as ending."""
    backend.submit(SPEC)
    operator.round()
    nodes.evict(cluster.get("pods", "smoke-worker-1"))
    assert cluster.get("pods", "smoke-worker-1")["metadata"]["deletionTimestamp"]
    status = backend.status("smoke")
    assert (status.state, status.reason) == ("restarting", "smoke-worker-1 is being ended, and will be replaced")
    assert [part.state for part in status.ranks] == ["running", "terminating"]


# Pods that were replaced: only the operator's events remain. Their texts are recorded.


def die(cluster: Cluster, operator: Operator, code: int) -> None:
    """Ends the second pod's container with this code. The operator then replaces the pod."""
    finish(cluster, cluster.get("pods", "smoke-worker-1"), code)
    operator.round()
    operator.round()


def test_why_a_pod_was_replaced_and_how_often(backend: Any, cluster: Cluster, operator: Operator) -> None:
    backend.submit(SPEC)
    operator.round()
    for _ in range(4):
        die(cluster, operator, 137)
    operator.round()
    status = backend.status("smoke")
    assert (status.state, [part.restarts for part in status.ranks]) == ("running", [0, 4]), status
    assert "exit code 137 (SIGKILL: it ran out of memory, was evicted" in status.ranks[1].reason
    operator.absent_pods.add("smoke-worker-1")
    die(cluster, operator, 138)
    status = backend.status("smoke")
    assert status.state == "restarting" and "smoke-worker-1 was replaced: exit code 138" in status.reason, status
    backend.cancel("smoke")
    backend.submit(SPEC)
    operator.absent_pods.clear()
    operator.round()
    assert [part.restarts for part in backend.status("smoke").ranks] == [0, 0], "those were of another job"
    evicted = cluster.get("pods", "smoke-worker-1")
    cluster.put("pods", {**evicted, "status": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}})
    assert "smoke-worker-1 was evicted: low on memory" in backend.status("smoke").reason
    operator.absent_pods.add("smoke-worker-1")
    operator.round()
    status = backend.status("smoke")
    assert (
        status.state == "restarting" and "replaced: it ended without an exit code: it was evicted" in status.reason
    ), status


def test_the_failed_rank_is_named_when_its_pod_is_gone(backend: Any, cluster: Cluster, operator: Operator) -> None:
    """The operator ends a job with the first pod that fails, and deletes the running pods."""
    backend.submit(SPEC)
    operator.round()
    finish(cluster, cluster.get("pods", "smoke-worker-1"), 2)
    operator.round()
    for name in ("smoke-worker-0", "smoke-worker-1"):
        cluster.remove("pods", name)
    status = backend.status("smoke")
    assert (status.state, status.code) == ("failed", 2) and "smoke-worker-1: wrong usage" in status.reason, status


def test_pods_of_others_are_not_counted(backend: Any, cluster: Cluster, operator: Operator) -> None:
    """Ending pods of an earlier job, and foreign pods with the job's label, do not change the status."""
    backend.submit(SPEC)
    operator.round()
    cluster.lag = 60.0
    cluster.remove("pytorchjobs", "smoke")
    backend.submit(SPEC)
    assert backend.status("smoke").ranks == []
    cluster.put(
        "pods", {"metadata": {"name": "x", "labels": {"lockstep/job": "smoke"}}, "status": ended(1), "spec": {}}
    )
    status = backend.status("smoke")
    assert (status.state, status.ranks) == ("pending", []), status


# Deletions that do not end.


def test_a_job_whose_node_has_died_is_cancelled_but_for_its_pod(
    backend: Any, cluster: Cluster, operator: Operator, nodes: Nodes
) -> None:
    """`cancel` ends at once, and names the pod that stays until the node is back or removed."""
    backend.submit(SPEC)
    operator.round()
    cluster.graceful, cluster.lag = True, 0.05
    nodes.die("node-1")
    nodes.clock.sleep(nodes.grace)
    start, tick_nodes = nodes.clock.now, nodes.tick

    def tick() -> None:
        tick_nodes()
        if cluster.get("pods", "smoke-worker-0"):  # its kubelet answers
            cluster.remove("pods", "smoke-worker-0")
        time.sleep(0.01)  # the collector uses the real clock

    nodes.tick = tick  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="kubectl delete pod --force smoke-worker-1") as error:
        backend.cancel("smoke")
    assert "the node node-1 of smoke-worker-1 does not answer" in str(error.value)
    assert nodes.clock.now - start < 30
    status = backend.status("smoke")
    assert "is being cancelled: the node node-1" in status.reason and "an administrator" in status.reason, status
    assert [part.state for part in status.ranks] == ["unknown"]


def test_a_fast_clock_of_ours_takes_no_pod_for_lost(backend: Any, cluster: Cluster, operator: Operator) -> None:
    """The server's clock counts. The client's clock is an hour ahead, past the end of the pods' grace period."""
    backend.submit(SPEC)
    operator.round()
    cluster.now = lambda: time.time() - 3600
    for number in range(2):
        cluster.change("pods", f"smoke-worker-{number}", metadata={"deletionTimestamp": cluster.stamp(30)})
    status = backend.status("smoke")
    assert [part.state for part in status.ranks] == ["terminating"] * 2 and "does not answer" not in status.reason, (
        status
    )


# The status that the run prints.


@pytest.mark.promise("survivors", "goodput")
def test_the_progress_that_the_run_prints_is_shown_with_the_time_before_it(backend: Any, cluster: Cluster) -> None:
    """The job's other pod is lost, and its ranks continue."""
    job = product.manifests("k8s", SPEC.model_copy(update={"live": True}))[0][1]
    cluster.put("pytorchjobs", job | {"metadata": job["metadata"] | {"creationTimestamp": "2026-01-02T00:00:00Z"}})
    cluster.pod(
        "smoke", "smoke-worker-0", {**RUNS, "conditions": [{**PLACED, "lastTransitionTime": "2026-01-02T00:01:00Z"}]}
    )
    cluster.pod("smoke", "smoke-worker-1", ended(137))
    shares = {"fraction": 0.9, "lost_to_restarts": 0.0, "restarts": 0}
    began = datetime(2026, 1, 2, 0, 1, 30, tzinfo=timezone.utc).timestamp()
    event = {
        "event": "status",
        "time": began + 60,
        "code": None,
        "reason": "running",
        "step": 41,
        "attempt": 1,
        "ranks": [2, 4],
    }
    lines = (json.dumps({**event, "step": step, "goodput": {**shares, "began": began}}) for step in (3, 41))
    cluster.logs["smoke-worker-0"] = [f"2026-01-02T00:02:00Z [rank 1] {line}" for line in (*lines, "and more")]
    status = backend.status("smoke")
    assert status.state == "running" and status.reason.endswith(
        "exit code 137: see `lockstep logs`; the others train on, step 41, 2 of 4 ranks"
    )
    assert status.goodput == shares
    cluster.logs["smoke-worker-0"] = ["2026-01-02T00:02:00Z [rank 0] " + json.dumps({**event, "step": "many"})]
    assert backend.status("smoke").goodput is None


@pytest.mark.promise("growth")
def test_a_rank_costs_one_pod_and_a_list_one_request_a_kind(backend: Any, cluster: Cluster, operator: Operator) -> None:
    for number in range(3):
        backend.submit(SPEC.model_copy(update={"name": f"job-{number}", "nodes": 3}))
    operator.round()
    cluster.logs["job-0-worker-2"] = ["2026-01-01T00:00:00.000000000Z [rank 5] five"]
    cluster.requests.clear()
    assert [*backend.logs("job-0", 5)] == [*backend.logs("job-0", 5, last=5)] == ["five"]
    assert not [path for _, path, *_ in cluster.requests if path.endswith("/pods")]
    cluster.requests.clear()
    assert len(backend.list()) == 3 and len(cluster.requests) == 2
