"""TrainJob compared to PyTorchJob: the same commands, other names and conditions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault

from tests.jobs.helpers import lockstep
from tests.product import JobSpec, UserError

SPEC = JobSpec.of(
    {"name": "second", "recipe": "smoke", "image": "localhost:5000/a:1", "nodes": 2, "ranks_per_node": 2, "k8s": {"kind": "TrainJob"}}
)  # fmt: skip
pytestmark = [pytest.mark.usefixtures("rights"), pytest.mark.promise("k8s-states")]


@pytest.fixture(autouse=True)
def _trainer(cluster: Cluster) -> None:
    cluster.unknown.clear()


def pod(cluster: Cluster, index: int, phase: str = "Running", suffix: str = "x7k2p", day: int = 1) -> None:
    host = f"second-node-0-{index}"
    meta = {
        "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        "creationTimestamp": f"2026-01-0{day}T00:00:00Z",
    }
    states = [{"name": "node", "restartCount": 0, "state": {"running": {}}}]
    status = {"phase": phase, "containerStatuses": states}
    cluster.pod("second", f"{host}-{suffix}", status, "trainjobs", spec={"hostname": host}, metadata=meta)
    ranks = (2 * index, 2 * index + 1)
    cluster.logs[f"{host}-{suffix}"] = [f"2026-01-01T00:00:00Z [rank {rank}] {rank} in {suffix}" for rank in ranks]


def test_a_trainjob_is_submitted_watched_and_read(backend: Any, cluster: Cluster) -> None:
    assert backend.submit(SPEC).created and not backend.submit(SPEC).created
    assert cluster.get("pytorchjobs", "second") is None
    (policy,), live = cluster.all("networkpolicies"), cluster.get("trainjobs", "second")
    assert policy["metadata"]["ownerReferences"][0]["kind"] == "TrainJob" and live["spec"]["suspend"] is False
    pod(cluster, 0, "Failed")
    pod(cluster, 1)
    pod(cluster, 0, suffix="zzzzz", day=2)  # a batch Job keeps a failed pod and its replacement, under one index
    status = backend.status("second")
    ranks = {part.name: part.ranks for part in status.ranks}
    assert (status.state, ranks) == ("running", {"second-node-0-0-zzzzz": [0, 1], "second-node-0-1-x7k2p": [2, 3]})
    assert list(backend.logs("second", rank=3)) == ["3 in x7k2p"]
    cluster.unknown.add("pytorchjobs")
    assert [(row.name, row.nodes) for row in backend.list()] == [("second", 2)], "the other operator need not be there"
    cluster.unknown.clear()
    cluster.change("trainjobs", "second", spec={"suspend": True})
    assert backend.status("second").state == backend.list()[0].state == "queued"
    cluster.change("trainjobs", "second", spec={"suspend": False})
    for condition, state, code in (("Failed", "failed", 1), ("Complete", "succeeded", 0)):
        cluster.set_conditions("second", {"type": condition, "reason": condition, "message": "m"}, plural="trainjobs")
        status = backend.status("second")
        assert (status.state, status.code) == (state, code), condition
    assert list(backend.logs("second", rank=0, follow=True)) == ["0 in zzzzz"], "of the new pod"
    active = {"conditions": [{"type": "Running", "status": "True"}], "jobsStatus": [{"name": "node", "ready": 1}]}
    cluster.change("trainjobs", "second", status=active)
    assert backend.list()[0].state == "running"
    assert backend.cancel("second").state == "cancelled" and cluster.get("trainjobs", "second") is None


REFUSED = {
    "runtime": (
        403, 'admission webhook "validator.example.io" denied the request: spec.RuntimeRef: "nope" not found',
        r'webhook validator\.example\.io refuses it: spec\.RuntimeRef: "nope" not found$',
    ),
    "Trainer 2.2": (
        400, 'strict decoding error: unknown field "spec.runtimePatches[0].terminationGracePeriodSeconds"',
        r"terminationGracePeriodSeconds.*Trainer 2\.3 or later",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_component_that_refuses_a_trainjob_is_named(backend: Any, cluster: Cluster, case: str) -> None:
    status, message, pattern = REFUSED[case]
    cluster.faults.append(Fault("POST", "/trainjobs", status=status, message=message, times=2))
    with pytest.raises(UserError, match=pattern):
        backend.submit(SPEC)
    (row,) = backend.dry_run(SPEC)
    assert row.result == "missing" and re.search(pattern, row.detail)


def test_pods_that_are_refused_are_reported(backend: Any, cluster: Cluster) -> None:
    """The event is on the batch Job that makes the pods. `status` reports its reason."""
    backend.submit(SPEC)
    pod(cluster, 0)
    about = {"kind": "Job", "name": "second-node-0", "uid": "1"}
    event = {"reason": "FailedCreate", "type": "Warning", "message": "Error creating: pods are forbidden: quota"}
    event = {"metadata": {"name": "e"}, **event, "involvedObject": about}
    cluster.put("events", event)
    assert "the others are refused: pods are forbidden: quota" in backend.status("second").reason
    cluster.put("events", {**event, "lastTimestamp": "2025-12-31T00:00:00Z"})
    assert "starting" in backend.status("second").reason, "an event of an earlier job with the name"


OLD = Fault("POST", "trainjobs.*dryRun", 400, 'strict decoding error: unknown field "terminationGracePeriodSeconds"')
AUTO: dict[str, tuple[set[str], Fault | None, dict[str, Any], str]] = {
    "both": (set(), None, {}, "trainjobs"),
    "both, Trainer before 2.3": (set(), OLD, {}, "pytorchjobs"),
    "both, a setting of PyTorchJobs": (set(), None, {"ttl": "1d"}, "pytorchjobs"),
    "the training-operator alone": ({"trainjobs"}, None, {}, "pytorchjobs"),
    "Trainer alone": ({"pytorchjobs"}, None, {}, "trainjobs"),
}
"""Kinds that are not served, a fault, settings → the kind of the job."""


@pytest.mark.parametrize("case", AUTO)
def test_the_kind_of_a_job_is_the_clusters(
    backend: Any, cluster: Cluster, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All commands find the job, also when the other kind is installed later."""
    cluster.unknown, fault, settings, plural = {*AUTO[case][0]}, *AUTO[case][1:]
    cluster.faults += [fault] if fault else []
    spec = JobSpec.of({**SPEC.plain(), "k8s": settings})
    assert backend.submit(spec).created
    (job,) = cluster.all(plural)
    assert json.loads(job["metadata"]["annotations"]["lockstep/spec"])["k8s"]["kind"] == job["kind"]
    assert job["metadata"]["labels"]["lockstep/spec-hash"] == spec.hash()
    assert ("although the cluster also has TrainJob" in capsys.readouterr().err) == bool(fault or settings)
    cluster.unknown.clear()
    assert not backend.submit(spec).created and backend.drift(spec) == []
    assert backend.status("second").state == "pending" and [row.name for row in backend.list()] == ["second"]
    assert [*backend.logs("second")] == []
    cluster.set_conditions("second", {"type": "Failed", "message": "m"}, plural=plural)
    assert backend.wait("second", 1).state == "failed"
    assert backend.submit(spec, "replace").created and len(cluster.all(plural)) == 1, "of the same kind"
    assert backend.cancel("second").state == "cancelled" and not cluster.all(plural)


def test_what_refuses_a_trainjob_makes_it_a_pytorchjob_decided_once(
    backend: Any, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule or the server refuses the TrainJob. The note quotes the server's message."""
    auto = {**SPEC.plain(), "k8s": {}}
    old = 'unknown field "spec.runtimePatches[0].x"'
    cases = {
        "a" * 50: (0, "at most"),
        "hook": (403, "denied it"),
        "bad": (422, "no"),
        "old": (400, old),
        "ill": (500, "hook failed"),
    }
    for name, (status, message) in cases.items():
        cluster.faults += [Fault("POST", "trainjobs.*dryRun", status, message, times=5)] if status else []
        assert backend.submit(JobSpec.of({**auto, "name": name})).created and cluster.get("pytorchjobs", name)
        cluster.faults = [fault for fault in cluster.faults if not fault.hits]
        stderr = capsys.readouterr().err
        assert message in stderr and ("Trainer 2.3" in stderr) == (name == "old"), (name, stderr)
    cluster.faults.append(Fault("POST", "trainjobs.*dryRun", 403, "no"))
    runs = [JobSpec.of({**auto, "name": f"run-{index}"}) for index in range(3)]
    assert all(done.created for done in backend.sweep("run", runs)) and not cluster.all("trainjobs")
    assert capsys.readouterr().err.count("although") == 1
    cluster.requests.clear()
    assert backend.drift(runs[0]) == [] and {method for method, *_ in cluster.requests} == {"GET"}


def test_a_cluster_without_either_kind_and_none_at_all(backend: Any, cluster: Cluster, tmp_path: Path) -> None:
    cluster.unknown |= {"pytorchjobs", "trainjobs"}
    with pytest.raises(UserError, match="neither PyTorchJob nor TrainJob"):
        backend.submit(JobSpec.of({**SPEC.plain(), "k8s": {}}))
    done = lockstep(tmp_path, "render", "k8s", "--recipe", "smoke", "--image", "localhost:5000/a:1")
    assert "kind: PyTorchJob" in done.stdout and "k8s.kind auto: rendered as PyTorchJob" in done.stderr
