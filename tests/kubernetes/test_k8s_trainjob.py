"""TrainJob beside PyTorchJob: the same commands, other names and conditions."""

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
    pod(
        cluster, 0, suffix="zzzzz", day=2
    )  # a batch Job keeps a failed pod beside the one that replaces it, under one index
    found = backend.status("second")
    ranks = {part.name: part.ranks for part in found.ranks}
    assert (found.state, ranks) == ("running", {"second-node-0-0-zzzzz": [0, 1], "second-node-0-1-x7k2p": [2, 3]})
    assert list(backend.logs("second", rank=3)) == ["3 in x7k2p"]
    cluster.unknown.add("pytorchjobs")
    assert [(row.name, row.nodes) for row in backend.list()] == [("second", 2)], "the other operator need not be there"
    cluster.unknown.clear()
    cluster.change("trainjobs", "second", spec={"suspend": True})
    assert backend.status("second").state == backend.list()[0].state == "queued"
    cluster.change("trainjobs", "second", spec={"suspend": False})
    for condition, state, code in (("Failed", "failed", 1), ("Complete", "succeeded", 0)):
        cluster.say("second", {"type": condition, "reason": condition, "message": "m"}, plural="trainjobs")
        found = backend.status("second")
        assert (found.state, found.code) == (state, code), condition
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
def test_who_refuses_a_trainjob_is_told(backend: Any, cluster: Cluster, case: str) -> None:
    status, message, told = REFUSED[case]
    cluster.faults.append(Fault("POST", "/trainjobs", status=status, message=message, times=2))
    with pytest.raises(UserError, match=told):
        backend.submit(SPEC)
    (row,) = backend.dry_run(SPEC)
    assert row.result == "missing" and re.search(told, row.detail)


def test_pods_that_are_refused_are_told(backend: Any, cluster: Cluster) -> None:
    """The batch Job that makes them has the event, under a name and a uid of its own."""
    backend.submit(SPEC)
    pod(cluster, 0)
    template = {"metadata": {"labels": {"lockstep/job": "second"}}}
    made = cluster.put("jobs", {"metadata": {"name": "second-node-0"}, "spec": {"template": template}})
    about = {"kind": "Job", "name": "second-node-0", "uid": made["metadata"]["uid"]}
    event = {"reason": "FailedCreate", "type": "Warning", "message": "Error creating: pods are forbidden: quota"}
    cluster.put("events", {"metadata": {"name": "e"}, **event, "involvedObject": about})
    assert "the others are refused: pods are forbidden: quota" in backend.status("second").reason
    cluster.put("jobs", {**made, "spec": {}})
    assert "starting" in backend.status("second").reason, "a Job of somebody else that has the name"


def test_auto_takes_the_kind_that_the_cluster_has(backend: Any, cluster: Cluster, tmp_path: Path) -> None:
    """The record keeps the answer: later it is the same job, whatever else has been installed."""

    def auto(name: str) -> JobSpec:
        return JobSpec.of({**SPEC.plain(), "name": name, "k8s": {"kind": "auto", "runtime": "lockstep"}})

    backend.submit(auto("both"))
    assert cluster.get("pytorchjobs", "both")
    cluster.unknown.add("pytorchjobs")
    backend.submit(auto("train"))
    assert cluster.get("trainjobs", "train") and backend.status("train").state == "pending"
    cluster.unknown.clear()
    assert not backend.submit(auto("train")).created and backend.drift(auto("train")) == []
    assert [row.name for row in backend.list()] == ["both", "train"]
    recorded = cluster.get("trainjobs", "train")["metadata"]["annotations"]["lockstep/spec"]
    assert json.loads(recorded)["k8s"]["kind"] == "TrainJob"
    cluster.unknown |= {"pytorchjobs", "trainjobs"}
    with pytest.raises(UserError, match="neither PyTorchJob nor TrainJob"):
        backend.submit(auto("none"))
    words = ("--recipe", "smoke", "--image", "localhost:5000/a:1", "--set", "k8s.kind=auto")
    done = lockstep(tmp_path, "render", "k8s", *words)
    assert "kind: PyTorchJob" in done.stdout and "k8s.kind auto: rendered as PyTorchJob" in done.stderr
