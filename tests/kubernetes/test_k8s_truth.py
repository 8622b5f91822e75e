"""Effects of real clusters on a job: foreign objects stay unchanged, and every job has its NetworkPolicy."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_operator import Operator

from tests import product
from tests.processes import poll
from tests.product import JobSpec, Unreachable, UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "localhost:5000/lockstep:1", "nodes": 2, "ranks_per_node": 2}
)
QUEUE = "kueue.x-k8s.io/queue-name"
pytestmark = [pytest.mark.usefixtures("rights"), pytest.mark.promise("k8s-truth")]
"""All tests here have only the rights of deploy/k8s/base."""


def policies(cluster: Cluster) -> list[str]:
    return sorted(item["metadata"]["name"] for item in cluster.all("networkpolicies"))


def has_policy(cluster: Cluster) -> bool:
    """Returns whether the job is not suspended and owns the only policy."""
    job, items = cluster.get("pytorchjobs", "smoke"), cluster.all("networkpolicies")
    selected = [item["spec"]["podSelector"]["matchLabels"] for item in items]
    owners = [owner["uid"] for item in items for owner in item["metadata"]["ownerReferences"]]
    return selected == [{"lockstep/job": "smoke"}] and owners == [job["metadata"]["uid"]] and not waits(job)


def waits(job: Any) -> bool:
    return bool(job["spec"]["runPolicy"].get("suspend"))


def uid(cluster: Cluster) -> str:
    return cluster.get("pytorchjobs", "smoke")["metadata"]["uid"]


def before(cluster: Cluster, method: str, what: str, work: Callable[[], object]) -> None:
    """Runs `work` before the server handles the next such request."""

    def arrived(sent_method: str, path: str) -> bool:
        if sent_method == method and what in path:
            cluster.arrived = None
            work()
        return False

    cluster.arrived = arrived


def test_objects_that_lockstep_did_not_make_stay_unchanged(backend: Any, cluster: Cluster) -> None:
    """A policy with the job's name and a foreign job stay unchanged."""
    policy = copy.deepcopy(cluster.put("networkpolicies", {"metadata": {"name": "smoke"}, "spec": {"podSelector": {}}}))
    backend.submit(SPEC)
    backend.cancel("smoke")
    poll(lambda: policies(cluster) == ["smoke"], 60, "the garbage collection")
    assert cluster.get("networkpolicies", "smoke") == policy
    cluster.requests.clear()
    job = cluster.put("pytorchjobs", {"metadata": {"name": "theirs"}, "spec": {}})
    for action in (
        lambda: backend.cancel("theirs"),
        lambda: backend.submit(SPEC.model_copy(update={"name": "theirs"}), "replace"),
    ):
        with pytest.raises(UserError, match="did not make"):
            action()
    assert cluster.get("pytorchjobs", "theirs") == job and {method for method, *_ in cluster.requests} == {"GET"}


def test_an_old_policys_end_does_not_take_the_new_one_away(backend: Any, cluster: Cluster) -> None:
    """The same spec is submitted again at once. The garbage collector acts half a second after the old job's end."""
    backend.submit(SPEC)
    for again in range(3):
        cluster.set_conditions("smoke", {"type": "Succeeded"})
        backend.submit(SPEC, "replace")
        poll(lambda: has_policy(cluster), 60, "the collection of the old one")
        if again == 1:  # a user deletes it as kubectl does: the policy outlives the job
            cluster.remove("pytorchjobs", "smoke")
            backend.submit(SPEC)
            poll(lambda: has_policy(cluster), 60, "the collection of the old one")
    time.sleep(cluster.lag + 0.3)  # the collector acts after its lag
    assert has_policy(cluster)


def test_no_pod_runs_before_what_belongs_to_the_job_is_there(
    backend: Any, cluster: Cluster, operator: Operator
) -> None:
    """The job is created first, suspended. After an interrupted submission `status` says so, and the next one finishes it."""
    observations: list[Any] = []

    def observe() -> None:
        operator.round()
        observations.append((waits(cluster.get("pytorchjobs", "smoke")), len(policies(cluster)), cluster.all("pods")))

    before(cluster, "PATCH", "/pytorchjobs/", observe)
    backend.submit(SPEC)
    assert observations == [(True, 1, [])] and has_policy(cluster)
    operator.round()
    assert backend.status("smoke").state == "running"
    backend.cancel("smoke")
    fault = Fault("POST", "networkpolicies", drop=True, times=5)
    cluster.faults.append(fault)
    with pytest.raises(Unreachable):
        backend.submit(SPEC)
    operator.round()
    status = backend.status("smoke")
    assert status.state == "pending" and "submit it again to finish it" in status.reason and not cluster.all("pods")
    assert [row.state for row in backend.list()] == ["pending"]
    again = JobSpec.of({**SPEC.plain(), "slurm": {"partition": "gpu"}})  # the same job here, with another hash
    assert not backend.submit(again).created
    operator.round()
    assert has_policy(cluster) and backend.status("smoke").state == "running"


def test_a_quota_that_the_job_itself_uses_up_keeps_no_submit_from_finishing_it(backend: Any, cluster: Cluster) -> None:
    """The server checks the quota before the store, so a 403 also answers the creation of an existing object."""
    cluster.faults.append(Fault("PATCH", "pytorchjobs", drop=True, times=5))
    with pytest.raises(Unreachable):
        backend.submit(SPEC)
    hard = {"count/networkpolicies.networking.k8s.io": "1", "count/pytorchjobs.kubeflow.org": "1"}
    cluster.put("resourcequotas", {"metadata": {"name": "one"}, "spec": {"hard": hard}})
    for _ in range(2):
        assert not backend.submit(SPEC).created and has_policy(cluster)
    backend.cancel("smoke")
    poll(lambda: not policies(cluster), 60, "the garbage collection")
    (_, job), _ = product.manifests("k8s", SPEC)
    before(cluster, "POST", "/pytorchjobs", lambda: cluster.create("pytorchjobs", job))
    assert not backend.submit(SPEC).created, "another one was faster with the same"


def test_with_a_queue_kueue_lets_the_job_run(backend: Any, cluster: Cluster, operator: Operator) -> None:
    """The queue's label is set last: Kueue admits a job that has it."""
    queued = JobSpec.of({**SPEC.plain(), "k8s": {"queue": "gpu"}})
    labels: list[Any] = []
    before(
        cluster,
        "PATCH",
        "/pytorchjobs/",
        lambda: labels.append(cluster.get("pytorchjobs", "smoke")["metadata"]["labels"]),
    )
    backend.submit(queued)
    live = cluster.get("pytorchjobs", "smoke")
    assert not any("kueue" in key for key in labels[0]) and live["metadata"]["labels"][QUEUE] == "gpu"
    operator.round()
    status = backend.status("smoke")
    assert (
        waits(live) and status.state == "queued" and "queue gpu has not seen it yet: is Kueue there?" in status.reason
    )
    assert backend.drift(queued) == []


def test_a_name_that_is_being_deleted_is_refused(backend: Any, cluster: Cluster) -> None:
    backend.submit(SPEC)
    marks = {"finalizers": ["example.org/hold"], "deletionTimestamp": "2026-01-01T00:00:01Z"}
    cluster.change("pytorchjobs", "smoke", metadata=marks)
    with pytest.raises(Unreachable, match="is being deleted: submit it again"):
        backend.submit(SPEC)
    cluster.remove("pytorchjobs", "smoke")
    assert backend.submit(SPEC).created


def test_cancel_waits_for_the_end_of_the_pods(backend: Any, cluster: Cluster) -> None:
    backend.submit(SPEC)
    cluster.change("pytorchjobs", "smoke", metadata={"finalizers": ["example.org/hold"]})
    methods = []

    def arrived(method: str, path: str) -> bool:
        methods.append(method)
        if methods[-4:].count("GET") == 4 and "DELETE" in methods:  # `cancel` polls whether the job still exists
            cluster.arrived = None
            cluster.remove("pytorchjobs", "smoke")
        return False

    cluster.arrived = arrived
    assert backend.cancel("smoke").state == "cancelled"
    assert cluster.get("pytorchjobs", "smoke") is None, "its pods still end"
    (options,) = [body for method, _, _, body in cluster.requests if method == "DELETE"]
    assert options["propagationPolicy"] == "Foreground"
