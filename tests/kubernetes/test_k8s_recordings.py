"""The emulated API server against recordings of a real one: status, shape and nulls of the same answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from k8s_cluster import KINDS, Cluster
from k8s_operator import Operator, finish
from k8s_server import ApiServer

from tests.jobs.helpers import lockstep
from tests.processes import poll
from tests.product import JobSpec

Recorded = dict[str, Any]
RECORDINGS = Path(__file__).parent / "recordings"
pytestmark = pytest.mark.promise("k8s-truth")


@pytest.fixture(autouse=True)
def _both_kinds(cluster: Cluster) -> None:
    cluster.unknown.clear()


EXACT = (
    "kind", "apiVersion", "group", "name", "namespace", "uid", "type", "status", "reason", "code", "finalizers",
    "deletionGracePeriodSeconds",
)  # fmt: skip
"""Other fields are compared by type, `message` too: the emulation has other texts."""


def recording(name: str) -> list[Recorded]:
    return [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]


def differences(real: Any, ours: Any, place: str = "") -> Iterator[str]:
    """Yields where `ours` differs from the recording. A Status may not have more fields; its `details`, which Lockstep does not read,
    are not compared. An object may have more fields, but not an unrecorded kind or apiVersion."""
    if isinstance(real, dict) and isinstance(ours, dict):
        real = {key: value for key, value in real.items() if key != "details" or real.get("kind") != "Status"}
        more = set(ours) - set(real)
        more &= more if real.get("kind") == "Status" else {"kind", "apiVersion"}
        yield from (f"{place}.{key}: is not recorded" for key in sorted(more))
        for key, value in real.items():
            if key not in ours:
                yield f"{place}.{key}: is missing"
            elif key in EXACT and value != ours[key]:
                yield f"{place}.{key}: {ours[key]!r}, recorded {value!r}"
            elif key not in EXACT:
                yield from differences(value, ours[key], f"{place}.{key}")
    elif isinstance(real, list) and isinstance(ours, list) and len(real) == len(ours):
        for index, pair in enumerate(zip(real, ours)):
            yield from differences(*pair, f"{place}[{index}]")
    elif type(real) is not type(ours) or isinstance(real, list):
        yield f"{place}: {ours!r}, recorded {real!r}"


def answer_to(server: ApiServer, row: Recorded, token: str = "good") -> tuple[int, Any]:
    """Sends a recorded request. Returns the emulation's status and JSON."""
    headers = {"Authorization": f"Bearer {token}", "Accept": row["request_accept"]}
    kind, value = row.get("request_content_type"), row["request_body"]
    headers |= {"Content-Type": kind} if kind else {}
    body = value if value is None or isinstance(value, str) else json.dumps(value)
    query = "&".join(f"{key}={value}" for key, value in row["query"].items())
    answer = urllib3.request(row["method"], f"{server.url}{row['path']}?{query}", body=body, headers=headers)
    plain = answer.headers.get("Content-Type", "").startswith("text/plain")
    return answer.status, answer.data.decode() if plain else json.loads(answer.data)


def differs(server: ApiServer, row: Recorded, token: str = "good") -> list[str]:
    """Returns the differences of the emulation's answer from the recorded one."""
    status, ours = answer_to(server, row, token)
    return [*([] if status == row["status"] else [f"status {status}"]), *differences(row["response_body"], ours)]


def put(cluster: Cluster, plural: str, name: str, uid: str, **metadata: Any) -> None:
    item = {"apiVersion": "kubeflow.org/v1", "kind": KINDS[plural], "spec": {}}
    cluster.put(plural, {**item, "metadata": {"name": name, "uid": uid, **metadata}}, "lockstep")


@pytest.mark.parametrize("row", recording("lists"), ids=lambda row: row["path"].rpartition("/")[2] + row["step"][-6:])
def test_lists(server: ApiServer, cluster: Cluster, row: Recorded) -> None:
    plural = row["path"].rpartition("/")[2]
    for item in row["response_body"]["items"] or []:
        name, label = item["metadata"]["name"], row["query"].get("labelSelector", "no=label").partition("=")
        put(cluster, plural, name, item["metadata"]["uid"], labels={label[0]: label[2]})
    assert differs(server, row) == []


@pytest.mark.parametrize("row", recording("failures"), ids=lambda row: f"{row['method']} {row['step']}")
def test_failures(server: ApiServer, cluster: Cluster, row: Recorded, request: pytest.FixtureRequest) -> None:
    put(cluster, "pytorchjobs", "l2", "14c51129-9baa-40cb-a39f-b668244f48fd")
    put(cluster, "pods", "lg-worker-0", "2")
    cluster.get("pods", "lg-worker-0", "lockstep")["spec"] = {"containers": [{"name": "pytorch"}]}
    if row["status"] == 403 and "quota" in row["response_body"]["message"]:
        put(cluster, "resourcequotas", "q1", "1")
        cluster.get("resourcequotas", "q1", "lockstep")["spec"] = {"hard": {"pods": "0"}}
        row["request_body"]["spec"] = {"containers": []}
    elif row["status"] == 403 and "/lockstep/" not in row["path"]:
        request.getfixturevalue("rights")
        cluster.home = "lockstep"
    elif row["status"] == 403 and "details" in row["response_body"]:
        cluster.denied.add(row["response_body"]["details"]["kind"])
    assert differs(server, row, "wrong" if row["status"] == 401 else "good") == []


def test_deletion_in_the_foreground(server: ApiServer, cluster: Cluster) -> None:
    """The job stays, marked for deletion, until its pod is removed."""
    deleted, there, gone, no_other = recording("foreground")[:4]
    uid = deleted["request_body"]["preconditions"]["uid"]
    put(cluster, "pytorchjobs", "wf", uid)
    cluster.graceful = True
    owners = [{"uid": uid, "blockOwnerDeletion": True}]
    put(cluster, "pods", "wf-worker-0", "1", ownerReferences=owners)
    put(cluster, "networkpolicies", "wf-1", "2", ownerReferences=[{"uid": uid}])
    for row in (deleted, there):
        assert differs(server, row) == []
    poll(lambda: cluster.get("networkpolicies", "wf-1", "lockstep") is None, 60, "the collector's work")
    assert cluster.get("pods", "wf-worker-0", "lockstep")["metadata"]["deletionTimestamp"], "its pod is told to end"
    assert answer_to(server, there)[0] == 200, "as long as the pod ends"
    cluster.remove("pods", "wf-worker-0", "lockstep")
    poll(lambda: answer_to(server, there)[0] == 404, 60, "the job's end")
    for row in (gone, no_other):
        assert differs(server, row) == []


def test_a_name_that_is_being_deleted(server: ApiServer, cluster: Cluster) -> None:
    """Another controller's finalizer keeps the object: a second DELETE changes nothing, and a POST is a conflict."""
    deleted, there, held, again, made = recording("foreground")[4:]
    put(cluster, "pytorchjobs", "del", deleted["response_body"]["metadata"]["uid"], finalizers=["example.org/hold"])
    for row in (deleted, there):
        assert differs(server, row) == []
    poll(lambda: len(answer_to(server, held)[1]["metadata"]["finalizers"]) == 1, 60, "the collector's work")
    for row in (held, again, made):
        assert differs(server, row) == []


@pytest.mark.parametrize("row", recording("operator"), ids=lambda row: row["scenario"])
def test_the_operator_says_what_was_recorded(cluster: Cluster, row: Recorded) -> None:
    """Conditions are compared in order, events with their counts. Events that repeat during a wait have no fixed count."""
    name, operator = row["job"], Operator(cluster, namespace="lockstep")
    job = {"metadata": {"name": name}, "spec": {"runPolicy": {"suspend": name == "sp"}, "pytorchReplicaSpecs": {}}}
    template = {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "pytorch"}]}}
    job["spec"]["pytorchReplicaSpecs"] = {"Worker": {"replicas": 2, "template": template}}
    cluster.put("pytorchjobs", job, "lockstep")
    operator.round()
    if name == "sp":
        cluster.change("pytorchjobs", name, "lockstep", spec={"runPolicy": {}})
    else:
        operator.round()
        if (code := {"su": 0, "f2": 2, "f137": 137}.get(name)) is not None:
            finish(cluster, cluster.get("pods", f"{name}-worker-{int(code > 0)}", "lockstep"), code, "lockstep")
    operator.round()
    if name == "f137":
        operator.round()
    conditions = cluster.get("pytorchjobs", name, "lockstep")["status"]["conditions"]
    assert [[item[key] for key in ("type", "status", "reason", "message")] for item in conditions] == row["conditions"]
    events = [
        [item[key] for key in ("type", "reason", "message", "count")] for item in cluster.all("events", "lockstep")
    ]
    repeated = ("PyTorchJobSuspended", "PyTorchJobResumed")
    ours, real = (
        sorted([*item[:3], *item[3:] * (item[1] not in repeated)] for item in which)
        for which in (events, row["events"])
    )
    if row["events"]:
        assert ours == real


STATUSES = {
    "ru": ("running", "2/2 pods run"),
    "su": ("succeeded", ""),
    "f1": ("failed", "f1-worker-1 ended with exit code 1"),
    "f2": ("failed", "f2-worker-1: wrong usage"),
    "f137": ("restarting", "f137-worker-1 was replaced: exit code 137 (SIGKILL: it ran out of memory, was evicted"),
    "oom": ("restarting", "oom-worker-1 was replaced: exit code 137"),
    "ip": ("pending", 'image pull failed: lockstep:latest on ip-worker-1: Back-off pulling image "registry.example/lockstep:cpu"'),
    "pe": ("pending", "0/2 pods run, the others are starting"),
    "ps": ("pending", 'the others are refused: pods "ps-worker-0" is forbidden: violates PodSecurity "restricted:latest"'),
    "qu": ("pending", 'pods "qu-worker-0" is forbidden: exceeded quota: q1'),
    "sp": ("queued", "suspended: it waits for someone to resume it"),
    "sq": ("pending", "0/2 pods run, the others are starting"),
    "qa": ("pending", 'pods "qa-worker-0" is forbidden: exceeded quota: q'),
    "lr": ("pending", "maximum cpu usage per Container is 1, but limit is 2"),
    "tl": ("pending", "maximum cpu usage per Container is 1, but limit is 2"),
    "tj1": ("pending", "0/2 pods run, the others are starting"),
    "un": ("unschedulable", "0/2 pods are placed: 0/3 nodes are available: 1 node(s) had untolerated taint(s)"),
}  # fmt: skip


@pytest.mark.promise("k8s-states")
@pytest.mark.parametrize("row", recording("jobs"), ids=lambda row: row["job"]["metadata"]["name"])
def test_the_status_of_a_real_servers_objects(server: ApiServer, row: Recorded, tmp_path: Path) -> None:
    """`lockstep status` reports the expected state for recorded jobs, pods and events."""
    cluster, job = server.cluster, row["job"]
    name, trains = job["metadata"]["name"], job["spec"].get("trainer", {}).get("numNodes")
    nodes = trains or job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]
    spec = JobSpec.of({"name": name, "recipe": "smoke", "image": "localhost:5000/one:1", "nodes": nodes})
    job["metadata"]["annotations"] = {"lockstep/spec": json.dumps(spec.plain())}  # the recordings have none
    server.kubeconfig(tmp_path / "kubeconfig", namespace="lockstep")
    kind, makers = f"{job['kind'].lower()}s", [row["maker"]] if "maker" in row else []
    for plural, items in ((kind, [job]), ("pods", row["pods"]), ("events", row["events"]), ("jobs", makers)):
        for item in items:
            cluster.put(plural, item, "lockstep")
    status = json.loads(lockstep(tmp_path, "status", "k8s", name, "--json").stdout)
    state, reason = STATUSES[name]
    assert status["state"] == state and reason in status["reason"], status
    if kind == "trainjobs" or name == "qa":
        (listed,) = json.loads(lockstep(tmp_path, "list", "k8s", "--json").stdout)
        assert listed["state"] == state
    assert [part["restarts"] for part in status["ranks"]] == [0, int(name in ("f137", "oom"))][: len(row["pods"])]
