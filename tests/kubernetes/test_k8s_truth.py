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
from k8s_operator import Operator, finish, until
from k8s_server import ApiServer

from lockstep.jobs.kubernetes import render
from lockstep.jobs.kubernetes.api import Api, load_configuration
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Unreachable
from lockstep.training.contract import UserError
from tests.processes import PYTHON, ROOT, clean_env, free_port, run

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"master": True}}
)  # fmt: skip
OTHER = SPEC.model_copy(update={"nodes": 3})
pytestmark = pytest.mark.usefixtures("rights")
"""Everything here is done with the rights of deploy/k8s/base alone."""


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
        if again % 2:  # somebody has deleted it as kubectl does: the policy outlives the job
            cluster.remove("pytorchjobs", "smoke")
            backend.submit(SPEC)
            assert owner(cluster, SPEC) == uid(cluster)
    time.sleep(cluster.lag + 0.3)  # what the collector does comes after its lag
    assert policies(cluster) == [policy(SPEC)] and owner(cluster, SPEC) == uid(cluster)


def test_an_old_policy_that_is_collected_at_the_worst_moment_is_not_the_new_jobs(
    backend: KubernetesBackend, cluster: Cluster
) -> None:
    """The garbage collection comes when the new job is about to be made: its policy has to be there, and stay."""
    backend.submit(SPEC)
    old, cluster.lag, there = uid(cluster), 60.0, []

    def arrived(method: str, path: str) -> bool:
        if method == "POST" and "/pytorchjobs" in path and "dryRun" not in path:
            cluster.collect(old)
            there.append(policies(cluster))
        return False

    cluster.remove("pytorchjobs", "smoke")  # as kubectl deletes it, which does not wait for what belongs to it
    cluster.arrived = arrived
    backend.submit(SPEC)
    cluster.arrived = None
    assert there == [[policy(SPEC)]], "no pod runs without it"
    assert policies(cluster) == [policy(SPEC)] and owner(cluster, SPEC) == uid(cluster) != old


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
    monkeypatch.setattr("lockstep.jobs.kubernetes.policy.GONE_SECONDS", 1.0)
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


def test_a_job_that_goes_just_now_is_not_taken_for_ours(backend: KubernetesBackend, cluster: Cluster) -> None:
    """The same spec, submitted and cancelled by somebody else in between; the job stays as long as its pods end."""

    def arrived(method: str, path: str) -> bool:
        if method == "POST" and "/pytorchjobs" in path and "dryRun" not in path:
            cluster.arrived = None
            job = render.kubernetes(SPEC)[1]
            job["metadata"]["finalizers"] = ["example.org/hold"]
            cluster.create("pytorchjobs", job)
            cluster.delete("pytorchjobs", "smoke", foreground=True)
        return False

    cluster.arrived = arrived
    with pytest.raises(UserError, match="smoke is being deleted by someone else: submit it again"):
        backend.submit(SPEC)


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
    command = [PYTHON, "-c", "from lockstep.jobs.cli.main import main; main()", "status", "k8s", "smoke"]
    env = clean_env(PYTHONPATH=str(ROOT), KUBECONFIG=str(server.kubeconfig(tmp_path / "expired", token="old")))
    done = run(command, env, cwd=tmp_path)
    assert done.code == 69 and "log in again" in done.output and done.output.count("\n") == 1, done
    away = server.kubeconfig(tmp_path / "away")
    away.write_text(away.read_text().replace(server.url, f"http://127.0.0.1:{free_port()}"))
    done = run(command, {**env, "KUBECONFIG": str(away)}, cwd=tmp_path)
    assert done.code == 69 and "cannot be reached" in done.output and done.output.count("\n") == 1, done


def test_a_wait_keeps_its_bound_against_a_server_that_stalls(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It returned after 55 s of 5."""
    monkeypatch.setattr(backend.api, "_sleep", time.sleep)
    backend.lost_after, backend.api.timeout = 300.0, 20.0
    backend.submit(SPEC)
    operator.round()
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
    backend: KubernetesBackend, cluster: Cluster, operator: Operator
) -> None:
    backend.lost_after = 20.0
    backend.submit(SPEC)
    operator.round()
    for name in ("smoke-master-0", "smoke-worker-0"):
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
    for pod in cluster.all("pods"):
        finish(cluster, pod, 0)
    operator.round()
    for thread in threads:
        thread.join(20)
    assert states == ["succeeded"] and seen == ["before", "after"]


# Configuration and rights.


def test_what_somebody_has_set_beats_what_the_pod_was_given(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "namespace"
    given.write_text("the-pods-own")
    monkeypatch.setattr("lockstep.jobs.kubernetes.api.NAMESPACE_FILE", given)
    assert load_configuration(None)[1] == "team"
    monkeypatch.delenv("KUBECONFIG")
    assert load_configuration(None)[1] == "the-pods-own"


def test_the_rights_of_one_kind_are_enough_for_it(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator
) -> None:
    """A 403 on TrainJobs was fatal to PyTorchJobs."""
    cluster.denied.add("trainjobs")
    assert backend.submit(SPEC).created
    operator.round()
    assert backend.status("smoke").state == "running" and [row.name for row in backend.list()] == ["smoke"]
    with pytest.raises(UserError, match="there is no job other"):
        backend.status("other")
    assert backend.cancel("smoke").state == "cancelled"
    cluster.denied.add("pytorchjobs")
    for question in (lambda: backend.status("smoke"), backend.list):
        with pytest.raises(UserError, match="not allowed"):
            question()
