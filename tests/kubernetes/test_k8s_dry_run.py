"""`submit --dry-run`: whether the job would start, when, and why not. Nothing is created on the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster, Fault

from tests.jobs.helpers import lockstep

JOB: dict[str, Any] = {"name": "big", "recipe": "smoke", "image": "localhost:5000/a:1", "nodes": 2, "gpus": 4}
DryRun = Callable[..., tuple[int, str, dict[str, tuple[str, str]]]]
pytestmark = pytest.mark.promise("k8s-truth")


@pytest.fixture
def dry_run(cluster: Cluster, tmp_path: Path) -> DryRun:
    """Returns (exit code, what the job would do, name → result and detail of each row)."""

    def ask(**changes: Any) -> tuple[int, str, dict[str, tuple[str, str]]]:
        (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **changes}))
        done = lockstep(tmp_path, "submit", "k8s", "job.yaml", "--dry-run", "--json")
        writing = [
            query for method, path, query, _ in cluster.requests if method != "GET" and "selfsubject" not in path
        ]
        assert all(query.get("dryRun") == "All" for query in writing) and not cluster.all("pytorchjobs"), done
        report = json.loads(done.stdout)
        return (
            done.returncode,
            report["would"],
            {row["name"]: (row["result"], row["detail"]) for row in report["checks"]},
        )

    return ask


def test_which_nodes_have_room_is_not_known_before(dry_run: DryRun) -> None:
    code, would, rows = dry_run()
    assert (code, would) == (0, "start") and rows["start"][0] == "cannot tell"


def test_the_state_of_the_queue_says_when(dry_run: DryRun, cluster: Cluster) -> None:
    queued, queue_spec = {"k8s": {"queue": "gpu"}}, {"spec": {"clusterQueue": "all"}}
    code, would, rows = dry_run(**queued)
    assert (code, would) == (2, "not start") and rows["queue"][0] == "missing"
    cluster.put("localqueues", {"metadata": {"name": "gpu"}, **queue_spec, "status": {"pendingWorkloads": 0}})
    assert dry_run(**queued)[:2] == (0, "start")
    cluster.change("localqueues", "gpu", status={"pendingWorkloads": 3})
    code, would, rows = dry_run(**queued)
    assert (code, would) == (0, "wait") and "3 jobs wait in the queue gpu" in rows["start"][1]
    stopped = {"conditions": [{"type": "Active", "status": "False", "message": "the ClusterQueue is stopped"}]}
    cluster.change("localqueues", "gpu", status=stopped)
    assert "is not active: the ClusterQueue is stopped" in dry_run(**queued)[2]["start"][1]


def test_what_the_server_refuses_is_the_reason(dry_run: DryRun, cluster: Cluster, tmp_path: Path) -> None:
    refusals = {
        'unknown field "spec.nope"': {"k8s": {"patch": {"spec": {"nope": 1}}}},
        "must be of type boolean": {"k8s": {"patch": {"spec": {"runPolicy": {"suspend": "yes"}}}}},
        'namespaces "nowhere" not found': {"k8s": {"namespace": "nowhere"}},
        "image is not set": {"image": None},
    }
    claim = {"spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    cluster.put("persistentvolumeclaims", {"metadata": {"name": "there"}, **claim})
    two = [{"claim": "gone", "path": "/data"}, {"claim": "there", "path": "/runs"}]
    assert dry_run(volumes=two)[:2] == (2, "not start"), "two rows have one name"
    for message, changes in refusals.items():
        code, would, rows = dry_run(**changes)
        assert (code, would) == (2, "not start") and message in rows["job"][1], (message, rows)
    cluster.put(
        "resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"count/pytorchjobs.kubeflow.org": "0"}}}
    )
    assert "exceeded quota: q" in dry_run()[2]["job"][1]
    cluster.faults.append(Fault("GET", "pytorchjobs", drop=True, times=99))
    done = lockstep(tmp_path, "submit", "k8s", "job.yaml", "--dry-run")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 69 and last.startswith("error: ") and "cannot be reached" in last and not done.stdout, (
        done
    )
