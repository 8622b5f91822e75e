"""The official client over real sockets: retries, slow servers, tokens, bounded waits."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster, Fault
from k8s_operator import Operator, finish
from k8s_server import ApiServer

from tests.jobs.helpers import lockstep
from tests.processes import free_port, poll
from tests.product import JobSpec, Unreachable, UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "localhost:5000/lockstep:1", "nodes": 2, "ranks_per_node": 2}
)
pytestmark = pytest.mark.promise("k8s-states")
Connect = Callable[..., Any]


@pytest.mark.promise("one-protocol")
def test_a_lost_answer_to_create_is_no_conflict(backend: Any, cluster: Cluster) -> None:
    """The connection breaks after the object is created. The retry gets a 409 for the object that it created."""
    cluster.faults.append(Fault("POST", r"pytorchjobs\?fieldValidation=Strict$", drop_answer=True))
    assert backend.submit(SPEC).created
    creates = [
        query for method, path, query, _ in cluster.requests if method == "POST" and path.endswith("pytorchjobs")
    ]
    assert len(creates) == 2, "the create was sent again"


@pytest.mark.parametrize("fault", [{"status": 503}, {"drop": True}], ids=str)
def test_what_passes_is_tried_again_and_what_lasts_is_not_wrong_usage(
    backend: Any, cluster: Cluster, fault: dict[str, Any]
) -> None:
    """Three failures in a row are tried again. A failure that stays is `Unreachable`, with the server's reason."""
    cluster.faults.append(Fault("*", "pytorchjobs", times=3, **fault))
    assert backend.submit(SPEC).created
    cluster.faults.append(lasting := Fault("*", "pytorchjobs", times=99, message="etcd is down\nvery", **fault))
    with pytest.raises(Unreachable, match="try again") as error:
        backend.status("smoke")
    assert lasting.hits == 5
    assert "\n" not in str(error.value) and ("drop" in fault or "etcd is down" in str(error.value))


def test_retry_after_is_obeyed_and_a_slow_server_given_up(connect: Connect, cluster: Cluster) -> None:
    pauses: list[float] = []
    cluster.faults.append(Fault("GET", "pytorchjobs", status=429, headers={"Retry-After": "7"}))
    connect(sleep=pauses.append).list()
    assert len(pauses) == 1 and pauses[0] >= 7
    cluster.faults.append(Fault("GET", "pytorchjobs", status=429, headers={"Retry-After": "1.5"}))
    connect(sleep=pauses.append).list()
    assert len(pauses) == 2 and pauses[1] < 1, "what is no time counts as absent"
    cluster.faults.append(Fault("GET", "pytorchjobs", delay=1.0, times=99))
    cluster.requests.clear()
    with pytest.raises(Unreachable, match=r"timed out"):
        connect(timeout=0.3, attempts=2).status("smoke")
    assert len(cluster.requests) == 1, "the time is that of all attempts together"


def test_an_expired_token_is_renewed_once(server: ApiServer, backend: Any, tmp_path: Path) -> None:
    backend.submit(SPEC)
    server.cluster.tokens = {"fresh"}
    server.kubeconfig(tmp_path / "kubeconfig", token="fresh")
    assert backend.status("smoke").state == "pending"
    server.cluster.tokens = {"other"}
    with pytest.raises(Unreachable, match="log in again"):
        backend.status("smoke")


def test_an_expired_login_and_a_server_that_is_away_end_commands_with_69(server: ApiServer, tmp_path: Path) -> None:
    expired = server.kubeconfig(tmp_path / "expired", token="old")
    away = server.kubeconfig(tmp_path / "away")
    away.write_text(away.read_text().replace(server.url, f"http://127.0.0.1:{free_port()}"))
    nowhere = tmp_path / "nowhere"
    nowhere.write_text(away.read_text().replace("127.0.0.1", "no-such-host.invalid"))
    refused, unknown = "Connection refused", "Failed to resolve"
    for file, message in ((expired, "log in again"), (away, refused), (nowhere, unknown)):
        done = lockstep(tmp_path, "status", "k8s", "smoke", KUBECONFIG=str(file))
        assert done.returncode == 69 and message in done.stderr and done.stderr.count("\n") == 1, done


def test_a_credential_plugin_is_called_once_and_its_message_is_printed(server: ApiServer, tmp_path: Path) -> None:
    """The plugin's error is printed. It is not hidden by the 403 that an anonymous client gets."""
    plugin, calls = tmp_path / "plugin", tmp_path / "asked"
    config = yaml.safe_load(server.kubeconfig(tmp_path / "kubeconfig").read_text())
    execute = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": execute}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    token = {"apiVersion": execute["apiVersion"], "kind": "ExecCredential", "status": {"token": "good"}}
    plugin.write_text(f"#!/bin/sh\necho >> {calls}\necho '{json.dumps(token)}'\n")
    plugin.chmod(0o755)
    assert lockstep(tmp_path, "list", "k8s").returncode == 0 and calls.read_text() == "\n"
    plugin.write_text("#!/bin/sh\necho the SSO session has expired >&2\nexit 7\n")
    done = lockstep(tmp_path, "status", "k8s", "smoke")
    assert done.returncode == 69 and done.stderr.count("\n") == 1, done
    assert "the SSO session has expired" in done.stderr
    done = lockstep(tmp_path, "doctor", "k8s")
    assert done.returncode == 1 and "the SSO session has expired" in done.stdout, done


@pytest.mark.promise("bad-input")
def test_no_kubeconfig_is_one_line(server: ApiServer, tmp_path: Path) -> None:
    config = yaml.safe_load(server.kubeconfig(tmp_path / "good").read_text())
    config["clusters"][0]["cluster"] = {"server": "https://127.0.0.1:1", "certificate-authority-data": "abcde"}
    for content in (None, b"a: [", b"\xff\xfe\x00", b"[1, 2]", b"clusters: 7\n", yaml.safe_dump(config).encode()):
        if content is not None:
            (tmp_path / "config").write_bytes(content)
        done = lockstep(tmp_path, "list", "k8s", KUBECONFIG=str(tmp_path / "config"))
        assert done.returncode == 2 and "kubeconfig" in done.stderr and done.stderr.count("\n") == 1, (content, done)


def test_refusals_say_what_to_do(backend: Any, cluster: Cluster) -> None:
    cluster.unknown.add("pytorchjobs")
    with pytest.raises(UserError, match="PyTorchJob.*training-operator"):
        backend.submit(JobSpec.of({**SPEC.plain(), "k8s": {"kind": "PyTorchJob"}}))
    cluster.unknown.remove("pytorchjobs")
    for name, status, why, pattern in (
        ("smoke", 403, 'User "me" cannot create it', "rbac.yaml"),
        ("smoke", 403, "exceeded quota: small, requested: count/pytorchjobs=1", "quota"),
        ("smoke", 422, "spec.nprocPerNode: Invalid value", "422.*spec.nprocPerNode"),
    ):
        cluster.faults.append(Fault("POST", "pytorchjobs", status=status, message=f'"{name}" is forbidden: {why}'))
        with pytest.raises(UserError, match=pattern) as error:
            backend.submit(SPEC.model_copy(update={"name": name}))
        assert not isinstance(error.value, Unreachable), "a retry would not help"
        assert not cluster.all("networkpolicies"), "the job comes first"
    cluster.faults.append(Fault("POST", "pytorchjobs", status=404, message='namespaces "team" not found'))
    with pytest.raises(UserError, match='namespaces "team" not found'):
        backend.submit(SPEC)
    for name in ("nothing", "../pods"):
        with pytest.raises(UserError, match=name):
            backend.status(name)


def test_the_rights_of_one_kind_are_enough_for_it(backend: Any, cluster: Cluster, operator: Operator) -> None:
    """The server refuses TrainJobs with 403. PyTorchJobs are still submitted, watched and cancelled."""
    cluster.unknown.clear()
    cluster.denied.add("trainjobs")
    assert backend.submit(SPEC).created
    operator.round()
    assert backend.status("smoke").state == "running" and [row.name for row in backend.list()] == ["smoke"]
    with pytest.raises(UserError, match="there is no k8s job other"):
        backend.status("other")
    assert backend.cancel("smoke").state == "cancelled"
    cluster.denied.add("pytorchjobs")
    for unknown in (set(), {"trainjobs"}):
        cluster.unknown |= unknown
        for question in (lambda: backend.status("smoke"), backend.list, lambda: backend.submit(SPEC)):
            with pytest.raises(UserError, match="not allowed"):
                question()


def test_a_job_with_the_name_of_a_preparation_is_left_alone(backend: Any, cluster: Cluster) -> None:
    values = {**SPEC.plain(), "shards": "/data/digits", "volumes": [{"claim": "data", "path": "/data"}]}
    spec = JobSpec.of(values)
    own = {"name": "smoke-prepare", "command": ["true"], "image": "localhost:5000/a:1"}
    backend.submit(JobSpec.of(own))
    cluster.set_conditions("smoke-prepare", {"type": "Succeeded"})
    with pytest.raises(UserError, match="smoke-prepare, and another job has it"):
        backend.prepare(spec)
    assert cluster.get("pytorchjobs", "smoke-prepare")


@contextlib.contextmanager
def after_next_requests(cluster: Cluster, action: Callable[[], object]) -> Iterator[None]:
    """Runs `action` after the next requests."""
    before = len(cluster.requests)

    def work() -> None:
        poll(lambda: len(cluster.requests) > before + 1, 60, "a question")
        action()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_wait_is_bounded_and_ends_with_the_job(connect: Connect, cluster: Cluster) -> None:
    backend = connect(interval=600)
    backend.submit(SPEC)
    began = time.monotonic()
    assert backend.wait("smoke", 0.3).state == "pending"
    assert time.monotonic() - began < 60, "before the next look, which is ten minutes away"
    backend.interval = 0.2
    with after_next_requests(cluster, lambda: cluster.set_conditions("smoke", {"type": "Succeeded"})):
        assert backend.wait("smoke", 90).state == "succeeded"


def test_wait_calls_what_is_gone_lost(backend: Any, cluster: Cluster) -> None:
    backend.submit(SPEC)
    with after_next_requests(cluster, lambda: cluster.remove("pytorchjobs", "smoke")):
        status = backend.wait("smoke", 90)
    assert (status.state, status.code) == ("lost", 4)


def test_a_wait_keeps_its_bound_against_a_server_that_stalls(
    connect: Connect, cluster: Cluster, operator: Operator
) -> None:
    """A request may take 200 s, and the server does not answer. A wait of two seconds still ends in time."""
    backend = connect(lost_after=600, timeout=200, sleep=time.sleep)
    backend.submit(SPEC)
    operator.round()
    cluster.faults.append(Fault("GET", "pods", delay=300, times=99))
    began = time.monotonic()
    status = backend.wait("smoke", 2)
    assert time.monotonic() - began < 60 and not status.final, status
    cluster.faults[-1].path = "."
    began = time.monotonic()
    with pytest.raises(Unreachable):
        backend.wait("smoke", 1)  # no request has succeeded
    assert time.monotonic() - began < 60


@pytest.mark.promise("logs")
def test_a_server_that_is_away_for_a_while_ends_neither_a_wait_nor_the_following_of_logs(
    connect: Connect, cluster: Cluster, operator: Operator
) -> None:
    """The server drops many requests in a row. The wait ends with the job, and the log has each line once."""
    backend = connect(lost_after=20)
    backend.submit(SPEC)
    operator.round()
    cluster.logs["smoke-worker-0"] = ["2026-01-01T00:00:00Z [rank 0] before"]
    lines: list[str] = []
    states: list[str] = []
    threads = [
        threading.Thread(target=lambda: lines.extend(backend.logs("smoke", rank=0, follow=True)), daemon=True),
        threading.Thread(target=lambda: states.append(backend.wait("smoke", 60).state), daemon=True),
    ]
    for thread in threads:
        thread.start()
    poll(lambda: lines == ["before"], 60, "the first line")
    outage = Fault("*", ".", drop=True, times=10**6)
    cluster.faults.append(outage)
    poll(lambda: outage.hits > 30, 60, "many requests that got no answer")
    with cluster.changed:
        outage.times = 0
    cluster.logs["smoke-worker-0"].append("2026-01-01T00:00:01Z [rank 0] after")
    poll(lambda: lines == ["before", "after"], 60, f"the line after the silence; {lines}")
    for pod in cluster.all("pods"):
        finish(cluster, pod, 0)
    operator.round()
    for thread in threads:
        thread.join(60)
    assert states == ["succeeded"] and lines == ["before", "after"]
