"""The official client over real sockets: conflicts, retries, slow servers, tokens, pages, watches, broken streams."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster, Fault
from k8s_operator import until
from k8s_server import ApiServer

from lockstep.jobs.kubernetes.answers import Listing
from lockstep.jobs.kubernetes.api import Api, ApiError, Gone, load_configuration
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.contract import UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"master": True}}
)  # fmt: skip
JOBS = "/apis/kubeflow.org/v1/namespaces/team/pytorchjobs"


def posts(cluster: Cluster, plural: str) -> list[dict[str, str]]:
    return [query for method, path, query, _ in cluster.requests if method == "POST" and path.endswith(plural)]


def finish(cluster: Cluster, name: str, kind: str = "Succeeded", message: str = "") -> None:
    job = cluster.get("pytorchjobs", name)
    assert job is not None
    cluster.put(
        "pytorchjobs", {**job, "status": {"conditions": [{"type": kind, "status": "True", "message": message}]}}
    )


def test_submit_is_strict_dry_first_and_idempotent(backend: KubernetesBackend, cluster: Cluster) -> None:
    assert backend.submit(SPEC).created
    assert not backend.submit(SPEC).created
    assert [query.get("dryRun") for query in posts(cluster, "pytorchjobs")] == ["All", None]
    assert all(query["fieldValidation"] == "Strict" for query in posts(cluster, "pytorchjobs"))
    job, policy = cluster.get("pytorchjobs", "smoke"), cluster.get("networkpolicies", f"smoke-{SPEC.hash()}")
    assert job and policy and policy["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]


def test_another_spec_of_the_same_name_is_refused_with_the_difference(backend: KubernetesBackend) -> None:
    backend.submit(SPEC)
    with pytest.raises(UserError, match=r"another spec \(nodes: 2 → 3\)"):
        backend.submit(SPEC.model_copy(update={"nodes": 3}))


def test_a_finished_name_is_refused_replaced_or_numbered(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    first = cluster.get("pytorchjobs", "smoke")["metadata"]["uid"]  # type: ignore[index]
    finish(cluster, "smoke")
    with pytest.raises(UserError, match=r"already finished: succeeded.*--replace.*--new"):
        backend.submit(SPEC)
    assert backend.submit(SPEC, "new").name == "smoke-v2"
    assert backend.submit(SPEC, "new").name == "smoke-v3"
    assert backend.submit(SPEC, "replace").name == "smoke"
    assert cluster.get("pytorchjobs", "smoke")["metadata"]["uid"] != first  # type: ignore[index]


def test_a_job_of_somebody_else_is_left_alone(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.put("pytorchjobs", {"metadata": {"name": "smoke"}, "spec": {}})
    with pytest.raises(UserError, match="lockstep did not make it"):
        backend.submit(SPEC, "replace")


def test_lint_errors_reach_no_server(backend: KubernetesBackend, cluster: Cluster) -> None:
    with pytest.raises(UserError, match="LS002"):
        backend.submit(SPEC.model_copy(update={"image": None}))
    assert not cluster.requests


def test_a_lost_answer_to_create_is_no_conflict(backend: KubernetesBackend, cluster: Cluster) -> None:
    """The object was made, the connection broke before the answer: the retry meets a conflict with itself."""
    cluster.faults.append(Fault("POST", r"pytorchjobs\?fieldValidation=Strict$", drop_answer=True))
    assert backend.submit(SPEC).created
    made = [query for query in posts(cluster, "pytorchjobs") if "dryRun" not in query]
    assert len(made) == 2, "the create was sent again, and met its own object"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_errors_are_retried(backend: KubernetesBackend, cluster: Cluster, status: int) -> None:
    cluster.faults.append(Fault("*", "pytorchjobs", status=status, times=3))
    assert backend.submit(SPEC).created


def test_retry_after_is_obeyed(server: ApiServer) -> None:
    pauses: list[float] = []
    load, _ = load_configuration(None)
    api = Api(load, sleep=pauses.append)
    server.cluster.faults.append(Fault("GET", "pods", status=429, headers={"Retry-After": "7"}))
    api.get("/api/v1/namespaces/team/pods", Listing)
    api.close()
    assert len(pauses) == 1 and pauses[0] >= 7


def test_lasting_errors_end_in_one_line(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.faults.append(Fault("*", "pytorchjobs", status=500, message="etcd is down\nvery", times=99))
    with pytest.raises(UserError, match=r"answers 500: etcd is down.*5 attempts"):
        backend.status("smoke")


def test_a_dropped_connection_is_retried(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.faults.append(Fault("*", "pytorchjobs", drop=True, times=2))
    assert backend.submit(SPEC).created


def test_a_slow_server_is_given_up_within_the_bound(server: ApiServer) -> None:
    load, namespace = load_configuration(None)
    api = Api(load, timeout=0.3, attempts=2, sleep=lambda seconds: None)
    server.cluster.faults.append(Fault("GET", "pytorchjobs", delay=1.0, times=99))
    began = time.monotonic()
    with pytest.raises(UserError, match=r"not answer within 0\.3 s \(2 attempts\)"):
        KubernetesBackend(api, namespace).status("smoke")
    assert time.monotonic() - began < 5
    api.close()


def test_no_server_at_all_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ApiServer() as gone:
        monkeypatch.setenv("KUBECONFIG", str(gone.kubeconfig(tmp_path / "config")))
    load, namespace = load_configuration(None)
    api = Api(load, attempts=2, sleep=lambda seconds: None)
    with pytest.raises(UserError, match="cannot be reached"):
        KubernetesBackend(api, namespace).list()
    api.close()


def test_an_expired_token_is_renewed_once(server: ApiServer, backend: KubernetesBackend, tmp_path: Path) -> None:
    backend.submit(SPEC)
    server.cluster.tokens = {"fresh"}
    server.kubeconfig(tmp_path / "kubeconfig", token="fresh")
    assert backend.status("smoke").state == "pending"
    server.cluster.tokens = {"other"}
    with pytest.raises(UserError, match="log in again"):
        backend.status("smoke")


@pytest.mark.parametrize(
    "content", [None, b"", b"a: [", b"\xff\xfe\x00", b"[1, 2]", b"clusters: 7\ncurrent-context: x\n"]
)
def test_no_kubeconfig_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "config").write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UserError, match="cannot read the kubeconfig") as caught:
        load_configuration(None)
    assert "\n" not in str(caught.value)


def test_damaged_certificates_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer) -> None:
    file = server.kubeconfig(tmp_path / "config")
    found = yaml.safe_load(file.read_text())
    found["clusters"][0]["cluster"] = {"server": "https://127.0.0.1:1", "certificate-authority-data": "abcde"}
    file.write_text(yaml.safe_dump(found))
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(UserError, match="cannot read the kubeconfig"):
        load_configuration(None)


def test_refusals_say_what_to_do(backend: KubernetesBackend, cluster: Cluster) -> None:
    cluster.unknown.add("pytorchjobs")
    with pytest.raises(UserError, match="does not have PyTorchJob: install the Kubeflow training-operator"):
        backend.submit(SPEC)
    cluster.unknown.clear()
    cluster.denied.add("pytorchjobs")
    with pytest.raises(UserError, match=r"not allowed: .*rbac\.yaml"):
        backend.submit(SPEC)
    cluster.denied.clear()
    cluster.faults.append(Fault("POST", "pytorchjobs", status=422, message="spec.nprocPerNode: Invalid value"))
    with pytest.raises(UserError, match=r"refuses \(422 Fault\): spec.nprocPerNode"):
        backend.submit(SPEC)
    assert cluster.get("networkpolicies", f"smoke-{SPEC.hash()}") is None, "the dry run comes first"
    with pytest.raises(UserError, match="there is no job nothing"):
        backend.status("nothing")
    with pytest.raises(UserError, match="is not a job name"):
        backend.status("../pods")


def test_pages_that_expire_begin_again_without_doubles(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.jobs.kubernetes.api.PAGE", 4)
    for number in range(10):
        server.cluster.put("pods", {"metadata": {"name": f"p{number}"}})
    load, _ = load_configuration(None)
    api = Api(load)
    found = []
    for item in api.pages("/api/v1/namespaces/team/pods"):
        found.append(item["metadata"]["name"])
        if len(found) == 3:
            server.cluster.put("pods", {"metadata": {"name": "late"}})
            server.cluster.forget_history()
    api.close()
    assert sorted(found) == ["late", *(f"p{number}" for number in range(10))]


def test_a_watch_reports_410_and_ends_quietly_when_it_drops(server: ApiServer) -> None:
    load, _ = load_configuration(None)
    api = Api(load)
    server.cluster.put("pytorchjobs", {"metadata": {"name": "a"}})
    server.cluster.put("pytorchjobs", {"metadata": {"name": "b"}})
    server.cluster.faults.append(Fault("GET", "watch=true", drop_after_lines=1))
    assert [event["object"]["metadata"]["name"] for event in api.watch(JOBS, "100", 5)] == ["a"]
    server.cluster.forget_history()
    with pytest.raises(Gone):
        list(api.watch(JOBS, "100", 5))
    server.cluster.faults.append(Fault("GET", "watch=true", status=403))
    with pytest.raises(ApiError):
        list(api.watch(JOBS, "100", 5))
    api.close()


def _watches(cluster: Cluster) -> int:
    return sum(query.get("watch") == "true" for _, _, query, _ in cluster.requests)


@contextlib.contextmanager
def once_watched(cluster: Cluster, happens: Callable[[], object], times: int = 1) -> Iterator[None]:
    """It happens when somebody has begun to watch, from here on, for the n-th time."""
    before = _watches(cluster)

    def work() -> None:
        until(lambda: _watches(cluster) >= before + times, 20, "a watch")
        happens()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.parametrize(
    "fault", [{"status": 410}, {"drop": True}, {"status": 500}, {"drop_after_lines": 0}],
    ids=["410", "drop", "500", "dropped stream"],
)  # fmt: skip
def test_wait_survives_a_watch_that_never_works(
    backend: KubernetesBackend, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    """Each broken watch is followed by a pause: it must not become a busy loop."""
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append, time=time.time)
    monkeypatch.setattr("lockstep.jobs.kubernetes.backend.time", clock)
    backend.interval = 60
    backend.submit(SPEC)
    cluster.faults.append(Fault("GET", "watch=true", times=10**6, **fault))
    with once_watched(cluster, lambda: finish(cluster, "smoke"), times=20):
        assert backend.wait("smoke", 600).state == "succeeded"
    broken = cluster.faults[0].hits
    assert broken >= 20 and len(pauses) >= broken / backend.api.attempts - 1
    assert set(pauses) == {12.0}


def test_wait_ends_as_soon_as_its_watch_tells(backend: KubernetesBackend, cluster: Cluster) -> None:
    """Long before the next look, which is a minute away."""
    backend.submit(SPEC)
    backend.interval = 60
    began = time.monotonic()
    with once_watched(cluster, lambda: finish(cluster, "smoke")):
        assert backend.wait("smoke", 90).state == "succeeded"
    assert time.monotonic() - began < 30 and _watches(cluster) == 1


def test_wait_is_bounded_and_calls_what_is_gone_lost(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    began = time.monotonic()
    assert backend.wait("smoke", 0.3).state == "pending"
    assert time.monotonic() - began < 20
    with once_watched(cluster, lambda: cluster.remove("pytorchjobs", "smoke")):
        found = backend.wait("smoke", 30)
    assert (found.state, found.code) == ("lost", 4)
    assert "gone from the cluster" in found.reason


def test_nodes_that_do_not_answer_are_lost_after_a_while(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    labels = {"lockstep/job": "smoke"}
    cluster.put("pods", {"metadata": {"name": "smoke-master-0", "labels": labels}, "status": {"phase": "Unknown"}})
    found = backend.wait("smoke", 30)
    assert found.state == "lost" and "node of smoke-master-0 does not answer" in found.reason


def test_cancel_waits_for_the_end_of_the_pods(backend: KubernetesBackend, cluster: Cluster) -> None:
    backend.submit(SPEC)
    job = cluster.get("pytorchjobs", "smoke")
    assert job is not None
    job["metadata"]["finalizers"] = ["example.org/hold"]

    def asked_since() -> int:
        methods = [method for method, path, _, _ in cluster.requests if path == f"{JOBS}/smoke"]
        return len(methods) - methods.index("DELETE") if "DELETE" in methods else 0

    def end() -> None:
        until(lambda: asked_since() > 2, 20, "cancel looks whether the job is still there")
        cluster.remove("pytorchjobs", "smoke")

    thread = threading.Thread(target=end)
    thread.start()
    assert backend.cancel("smoke").state == "cancelled"
    assert cluster.get("pytorchjobs", "smoke") is None, "its pods still end"
    thread.join()
    deletes = [body for method, _, _, body in cluster.requests if method == "DELETE"]
    assert deletes[0]["propagationPolicy"] == "Foreground"


def test_a_thousand_jobs_and_ten_thousand_pods_take_no_second(backend: KubernetesBackend, cluster: Cluster) -> None:
    from lockstep.jobs.kubernetes.render import kubernetes as render

    job = render(SPEC.model_copy(update={"nodes": 10}))[1]
    status = {"conditions": [{"type": "Running", "status": "True"}]}
    for number in range(1000):
        named = {**job, "metadata": {**job["metadata"], "name": f"job-{number}"}}
        cluster.put("pytorchjobs", {**named, "status": status})
        for pod in range(10):
            name = f"job-{number}-{'master' if pod == 0 else 'worker'}-{max(pod - 1, 0)}"
            labels = {"lockstep/job": f"job-{number}"}
            cluster.put("pods", {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Running"}})
    took = {}
    for name, ask in [("list", backend.list), ("status", lambda: backend.status("job-500"))]:
        times = []
        for _ in range(3):
            began = time.process_time()  # the server's, too: it is a thread of this process
            answer = ask()
            times.append(time.process_time() - began)
        took[name] = min(times)
        if name == "list":
            assert len(answer) == 1000  # type: ignore[arg-type]
        else:
            assert answer.state == "running" and len(answer.ranks) == 10  # type: ignore[union-attr]
    print(took)
    assert max(took.values()) <= 1.0, took
