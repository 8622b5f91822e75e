"""What real clusters do to a job, and what lockstep says and does about it. Seen on Kubernetes 1.36."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster, Fault
from k8s_operator import until
from k8s_server import ApiServer

from jobs.kubernetes.api import Api, load_configuration
from jobs.kubernetes.backend import KubernetesBackend
from jobs.spec.model import JobSpec
from jobs.status import Unreachable
from tests.processes import PYTHON, ROOT, clean_env, free_port, run
from training.contract import UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"master": True}}
)  # fmt: skip
OTHER = SPEC.model_copy(update={"nodes": 3})
ROLE = next(
    item
    for item in yaml.safe_load_all((ROOT / "deploy/k8s/base/rbac.yaml").read_text())
    if item["kind"] == "Role"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _rights(cluster: Cluster) -> None:
    """Everything here is done with the rights of deploy/k8s/base alone."""
    cluster.allow(ROLE)


@pytest.fixture
def second(server: ApiServer) -> Iterator[KubernetesBackend]:
    """Another person at another machine."""
    load, namespace = load_configuration(None)
    api = Api(load, timeout=5)
    yield KubernetesBackend(api, namespace, interval=0.2, lost_after=1.0)
    api.close()


def policy(spec: JobSpec) -> str:
    return f"{spec.name}-{spec.hash()}"


def policies(cluster: Cluster) -> list[str]:
    with cluster.changed:
        return sorted(name for plural, _, name in cluster.objects if plural == "networkpolicies")


def ended(cluster: Cluster, name: str = "smoke") -> None:
    job = cluster.get("pytorchjobs", name)
    assert job is not None
    cluster.put("pytorchjobs", {**job, "status": {"conditions": [{"type": "Succeeded", "status": "True"}]}})


def owner(cluster: Cluster, spec: JobSpec) -> str | None:
    found = cluster.get("networkpolicies", policy(spec))
    return found["metadata"]["ownerReferences"][0]["uid"] if found else None


def uid(cluster: Cluster) -> str:
    found = cluster.get("pytorchjobs", "smoke")
    assert found is not None
    return str(found["metadata"]["uid"])


# Not ours is not touched.


def test_a_network_policy_of_somebody_else_is_left_as_it_is(backend: KubernetesBackend, cluster: Cluster) -> None:
    """Neither one that has the job's name nor one that has the policy's."""
    closed = cluster.put("networkpolicies", {"metadata": {"name": "smoke"}, "spec": {"podSelector": {}}})
    before = yaml.safe_dump(closed)
    backend.submit(SPEC)
    backend.cancel("smoke")
    until(lambda: policies(cluster) == ["smoke"], 10, "the garbage collection")
    assert yaml.safe_dump(cluster.get("networkpolicies", "smoke")) == before
    cluster.put("networkpolicies", {"metadata": {"name": policy(SPEC)}, "spec": {"podSelector": {}}})
    with pytest.raises(UserError, match="exists, and lockstep did not make it"):
        backend.submit(SPEC)
    assert cluster.get("pytorchjobs", "smoke") is None, "a job never runs without its policy"
    assert cluster.get("networkpolicies", policy(SPEC))["spec"] == {"podSelector": {}}  # type: ignore[index]


def test_a_job_that_lockstep_did_not_make_is_not_cancelled(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.put("pytorchjobs", {"metadata": {"name": "theirs"}, "spec": {}})
    with pytest.raises(UserError, match="lockstep did not make theirs, and leaves it alone"):
        backend.cancel("theirs")
    assert cluster.get("pytorchjobs", "theirs") is not None and not [r for r in cluster.requests if r[0] == "DELETE"]


def test_a_prepare_job_of_somebody_else_is_not_taken_for_ours(backend: KubernetesBackend, cluster: Cluster) -> None:
    spec = SPEC.model_copy(update={"shards": "/data/x", "volumes": JobSpec.of(
        {"name": "a", "recipe": "smoke", "volumes": [{"claim": "d", "path": "/data"}]}).volumes})  # fmt: skip
    assert backend.prepare(spec).created and not backend.prepare(spec).created
    (name,) = [name for plural, _, name in cluster.objects if plural == "jobs"]
    cluster.remove("jobs", name)
    cluster.put("jobs", {"metadata": {"name": name}})
    with pytest.raises(UserError, match="exists, and lockstep did not make it"):
        backend.prepare(spec)


# Two at once.


@pytest.mark.parametrize("other", [OTHER, SPEC], ids=["another spec", "the same spec"])
def test_of_two_submissions_at_once_the_winners_job_has_the_winners_policy(
    backend: KubernetesBackend, second: KubernetesBackend, cluster: Cluster, other: JobSpec
) -> None:
    for round_ in range(6):
        cluster.faults.append(Fault("POST", r"networkpolicies\?", delay=0.05, status=0, times=2))
        said: list[Any] = []

        def go(own: KubernetesBackend, spec: JobSpec, said: list[Any] = said) -> None:
            try:
                said.append(own.submit(spec))
            except UserError as error:
                said.append(str(error))

        threads = [threading.Thread(target=go, args=pair) for pair in ((backend, SPEC), (second, other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        job = cluster.get("pytorchjobs", "smoke")
        assert job is not None and len(said) == 2
        won = SPEC if job["metadata"]["labels"]["lockstep/spec-hash"] == SPEC.hash() else other
        assert owner(cluster, won) == job["metadata"]["uid"]
        assert policies(cluster) == [policy(won)], "nothing of the loser is left"
        refused = [text for text in said if isinstance(text, str)]
        assert len(refused) == (0 if other is SPEC else 1), (round_, said)
        assert all("another spec" in text for text in refused)
        backend.cancel("smoke")


def test_an_old_policys_end_does_not_take_the_new_one_away(backend: KubernetesBackend, cluster: Cluster) -> None:
    """The same spec again, at once: the garbage collection comes half a second after the old job's end."""
    backend.submit(SPEC)
    for again in range(5):
        ended(cluster)
        backend.submit(SPEC, "replace")
        assert owner(cluster, SPEC) == uid(cluster)
        if again % 2:
            backend.cancel("smoke")
            backend.submit(SPEC)
    time.sleep(cluster.lag + 0.3)  # what the collector does comes after its lag
    assert policies(cluster) == [policy(SPEC)] and owner(cluster, SPEC) == uid(cluster)


def test_a_policy_that_a_killed_submission_left_is_taken_over(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.faults.append(Fault("POST", r"pytorchjobs\?fieldValidation=Strict$", status=422, message="killed here"))
    with pytest.raises(UserError, match="killed here"):
        backend.submit(SPEC)
    assert policies(cluster) == [policy(SPEC)]
    assert backend.submit(SPEC).created and owner(cluster, SPEC) == uid(cluster)


def test_attaching_brings_a_policy_back(backend: KubernetesBackend, cluster: Cluster) -> None:
    """A submission was cut off before it had its owner, or somebody has deleted it."""
    backend.submit(SPEC)
    cluster.remove("networkpolicies", policy(SPEC))
    assert not backend.submit(SPEC).created and owner(cluster, SPEC) == uid(cluster)
    found = cluster.get("networkpolicies", policy(SPEC))
    assert found is not None
    del found["metadata"]["ownerReferences"]
    assert not backend.submit(SPEC).created and owner(cluster, SPEC) == uid(cluster)


def test_a_policy_that_can_never_be_made_is_given_up(
    backend: KubernetesBackend, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """409 is also the answer of a server that is busy with another change."""
    monkeypatch.setattr("jobs.kubernetes.policy.GONE_SECONDS", 1.0)
    busy = Fault("POST", "networkpolicies", status=409, times=10**6)
    cluster.faults.append(busy)
    with pytest.raises(UserError, match="cannot be made"):
        backend.submit(SPEC)
    assert busy.hits < 20 and cluster.get("pytorchjobs", "smoke") is None


def test_a_name_that_is_being_deleted_is_waited_for(
    backend: KubernetesBackend, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "is there already", and the job was lost."""
    backend.submit(SPEC)
    job = cluster.get("pytorchjobs", "smoke")
    assert job is not None
    meta = {**job["metadata"], "finalizers": ["foregroundDeletion"], "deletionTimestamp": "2026-01-01T00:00:01Z"}
    cluster.put("pytorchjobs", {**job, "metadata": meta})
    old = uid(cluster)
    timer = threading.Timer(1.0, cluster.finish_deletion, ["pytorchjobs", "smoke"])
    timer.start()
    assert backend.submit(SPEC).created and uid(cluster) != old
    assert "smoke is being deleted: waiting until it is gone" in capsys.readouterr().err
    timer.join()


# What becomes of pods and nodes.


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


def event(cluster: Cluster, about: dict[str, Any], reason: str, message: str, uid: str | None = None) -> None:
    involved = {"name": about["metadata"]["name"], "uid": uid or about["metadata"]["uid"]}
    name = f"{involved['name']}.{reason}.{involved['uid'][:4]}".lower()
    cluster.put("events", {"metadata": {"name": name}, "involvedObject": involved, "reason": reason, "message": message,
                           "type": "Warning"})  # fmt: skip


NOT_READY = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
UNSAID = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
PAST = "2026-01-01T00:05:40Z"
LATE = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 90))


@pytest.mark.parametrize(
    "dead",
    [
        {"conditions": [NOT_READY]},
        {"conditions": UNSAID},
        {"meta_deletionTimestamp": PAST, "meta_deletionGracePeriodSeconds": 90},
        {"meta_deletionTimestamp": LATE, "meta_deletionGracePeriodSeconds": 3600},
    ],
    ids=[
        "not ready",
        "not ready, without a reason",
        "terminating for ever",
        "a long grace, which the time stamp holds",
    ],
)
def test_a_node_that_dies_is_named_and_then_lost(
    backend: KubernetesBackend, cluster: Cluster, dead: dict[str, Any]
) -> None:
    """Its pods keep the phase Running."""
    backend.submit(SPEC)
    pod(cluster)
    pod(cluster, "smoke-worker-0", **dead)
    found = backend.status("smoke")
    assert found.state == "running" and "smoke-worker-0" in found.reason and "node-7" in found.reason, found
    assert [part.state for part in found.ranks] == ["running", "unknown"]
    began = time.monotonic()
    found = backend.wait("smoke", 30)
    assert found.state == "lost" and "node-7" in found.reason and "(for 1 s)" in found.reason, found
    assert time.monotonic() - began < 10


def test_a_pod_that_ends_in_its_grace_is_not_called_silent(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    pod(cluster)
    pod(cluster, "smoke-worker-0", meta_deletionTimestamp=later, meta_deletionGracePeriodSeconds=90)
    assert backend.status("smoke").reason == "2/2 pods run"


QUOTA = 'pods "smoke-worker-0" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1'


def test_a_pod_that_is_refused_is_told_although_others_run(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    pod(cluster)
    event(cluster, cluster.get("pytorchjobs", "smoke"), "FailedCreatePod", QUOTA)  # type: ignore[arg-type]
    found = backend.status("smoke")
    assert (found.state, found.reason) == ("pending", f"1/2 pods run, the others are refused: {QUOTA}")


def test_events_of_an_earlier_job_of_the_name_do_not_count(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    event(cluster, cluster.get("pytorchjobs", "smoke"), "FailedCreatePod", QUOTA, uid="an-earlier-one")  # type: ignore[arg-type]
    assert "no pods yet" in backend.status("smoke").reason


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


def test_a_refusal_that_is_over_is_not_told(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    event(cluster, cluster.get("pytorchjobs", "smoke"), "FailedCreatePod", QUOTA)  # type: ignore[arg-type]
    (refused,) = [item for (kind, _, _), item in cluster.objects.items() if kind == "events"]
    cluster.put("events", {**refused, "lastTimestamp": "2025-12-31T23:00:00Z"})
    pod(cluster)
    assert backend.status("smoke").reason == "1/2 pods run, the others are starting"


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


# What the server answers, and when it does not.

FORBIDDEN = 'pytorchjobs.kubeflow.org "{name}" is forbidden: {why}'


@pytest.mark.parametrize(
    ("name", "why", "sentence"),
    [
        ("smoke", 'User "me" cannot create resource "pytorchjobs"', "ask for the rights in deploy/k8s/base/rbac.yaml"),
        (
            "smoke",
            "exceeded quota: small, requested: count/pytorchjobs=1",
            "wait for other jobs to end, or ask for more",
        ),
        ("smoke", "unable to create new content in namespace team because it is being terminated", "use another one"),
        ("is-being-terminated", 'User "me" cannot create resource "pytorchjobs"', "ask for the rights"),
    ],
)
def test_three_kinds_of_403_are_told_apart(
    backend: KubernetesBackend, cluster: Cluster, name: str, why: str, sentence: str
) -> None:
    cluster.faults.append(Fault("POST", "pytorchjobs", status=403, message=FORBIDDEN.format(name=name, why=why)))
    with pytest.raises(UserError, match=sentence) as caught:
        backend.submit(SPEC.model_copy(update={"name": name}))
    assert not isinstance(caught.value, Unreachable), "nobody should try that again"


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}, {"status": 507}], ids=["503", "no network", "507"])
def test_no_answer_is_not_wrong_usage(backend: KubernetesBackend, cluster: Cluster, fault: dict[str, Any]) -> None:
    cluster.faults.append(Fault("*", "pytorchjobs", times=99, **fault))
    with pytest.raises(Unreachable):
        backend.status("smoke")


def test_an_expired_login_and_a_server_that_is_away_end_commands_with_69(
    server: ApiServer, cluster: Cluster, tmp_path: Path
) -> None:
    command = [PYTHON, "-c", "from jobs.cli.main import main; main()", "status", "k8s", "smoke"]
    env = clean_env(PYTHONPATH=str(ROOT), KUBECONFIG=str(server.kubeconfig(tmp_path / "expired", token="old")))
    done = run(command, env, cwd=tmp_path)
    assert done.code == 69 and "log in again" in done.output and done.output.count("\n") == 1, done
    away = server.kubeconfig(tmp_path / "away")
    away.write_text(away.read_text().replace(server.url, f"http://127.0.0.1:{free_port()}"))
    done = run(command, {**env, "KUBECONFIG": str(away)}, cwd=tmp_path)
    assert done.code == 69 and "cannot be reached" in done.output and done.output.count("\n") == 1, done


def test_a_wait_keeps_its_bound_against_a_server_that_stalls(
    backend: KubernetesBackend, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returned after 55 s of 5."""
    monkeypatch.setattr(backend.api, "_sleep", time.sleep)
    backend.lost_after, backend.api.timeout = 300.0, 20.0
    backend.submit(SPEC)
    pod(cluster)
    cluster.faults.append(Fault("GET", "pods", delay=30, times=99))
    began = time.monotonic()
    found = backend.wait("smoke", 3)
    assert time.monotonic() - began < 3 + 2 and not found.final, found
    cluster.faults[-1].path = "."
    began = time.monotonic()
    with pytest.raises(Unreachable):
        backend.wait("smoke", 2)  # it never heard of the job
    assert time.monotonic() - began < 2 + 2


def test_a_wait_that_may_not_look_says_so_at_once(backend: KubernetesBackend, cluster: Cluster) -> None:
    """It called the job lost after five minutes."""
    backend.lost_after = 300.0
    backend.submit(SPEC)
    cluster.denied.add("pods")
    with pytest.raises(UserError, match="not allowed"):
        backend.wait("smoke", 60)
    cluster.denied.clear()
    cluster.tokens.clear()
    with pytest.raises(Unreachable, match="log in again"):
        backend.wait("smoke", 60)


def test_a_server_that_is_away_for_a_while_ends_neither_a_wait_nor_the_following_of_logs(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    backend.lost_after = 20.0
    backend.submit(SPEC)
    for name in ("smoke-master-0", "smoke-worker-0"):
        pod(cluster, name)
        cluster.logs[name] = ["2026-01-01T00:00:00.000000001Z [rank 0] before"]
    seen: list[str] = []
    states: list[str] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(backend.logs("smoke", rank=0, follow=True)), daemon=True),
        threading.Thread(target=lambda: states.append(backend.wait("smoke", 60).state), daemon=True),
    ]
    for thread in threads:
        thread.start()
    until(lambda: seen == ["before"], 20, "the first line")
    gone = Fault("*", ".", drop=True, times=10**6)
    cluster.faults.append(gone)
    until(lambda: gone.hits > 30, 20, "many requests that got no answer")
    with cluster.changed:
        gone.times = 0
    cluster.logs["smoke-master-0"] = [*cluster.logs["smoke-master-0"], "2026-01-01T00:00:01.000000001Z [rank 0] after"]  # type: ignore[misc]
    until(lambda: seen == ["before", "after"], 20, f"the line after the silence; {seen}")
    for name in ("smoke-master-0", "smoke-worker-0"):
        pod(cluster, name, "Succeeded")
    ended(cluster)
    for thread in threads:
        thread.join(20)
    assert states == ["succeeded"] and seen == ["before", "after"]


# Configuration and rights.


def test_what_somebody_has_set_beats_what_the_pod_was_given(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "namespace"
    given.write_text("the-pods-own")
    monkeypatch.setattr("jobs.kubernetes.api.NAMESPACE_FILE", given)
    assert load_configuration(None)[1] == "team"
    monkeypatch.delenv("KUBECONFIG")
    assert load_configuration(None)[1] == "the-pods-own"


def test_the_rights_of_one_kind_are_enough_for_it(backend: KubernetesBackend, cluster: Cluster) -> None:
    """A 403 on TrainJobs was fatal to PyTorchJobs."""
    cluster.denied.add("trainjobs")
    assert backend.submit(SPEC).created
    pod(cluster)
    assert backend.status("smoke").state == "pending" and [row.name for row in backend.list()] == ["smoke"]
    with pytest.raises(UserError, match="there is no job other"):
        backend.status("other")
    assert backend.cancel("smoke").state == "cancelled"
    cluster.denied.add("pytorchjobs")
    for question in (lambda: backend.status("smoke"), backend.list):
        with pytest.raises(UserError, match="not allowed"):
            question()
