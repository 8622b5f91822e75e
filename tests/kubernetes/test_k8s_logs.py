"""Logs of ranks, through Pending, replaced pods, broken streams, and nodes whose clocks are not on UTC."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_operator import Operator, finish

from tests.jobs.helpers import lockstep
from tests.processes import poll
from tests.product import JobSpec, UserError

SPEC = JobSpec.of(
    {"name": "smoke", "recipe": "smoke", "image": "localhost:5000/lockstep:1", "nodes": 2, "ranks_per_node": 2}
)
HERE, THERE = "smoke-worker-0", "smoke-worker-1"
pytestmark = pytest.mark.promise("logs")


@pytest.fixture
def pods(backend: Any, cluster: Cluster, operator: Operator) -> Cluster:
    backend.submit(SPEC)
    operator.round()
    return cluster


def log_requests(cluster: Cluster) -> list[tuple[str, str | None]]:
    """Returns (pod, tailLines) of each request for a log."""
    logs = [(path.split("/")[-2], query) for _, path, query, _ in cluster.requests if path.endswith("/log")]
    return [(name, query.get("tailLines")) for name, query in logs]


def test_logs_of_a_rank_come_from_its_pod(backend: Any, pods: Cluster) -> None:
    pods.logs[HERE] = [f"2026-01-01T00:00:00Z {line}" for line in ("[rank 0] zero", "[rank 1] one", "launch: joined")]
    words = "unable to retrieve container logs for containerd://1f2e"  # the kubelet's messages have no time stamp
    pods.logs[THERE] = ["2026-01-01T02:00:00.0+02:00 [rank 2] two", words, "2026-01-01T02:00:00.0+02:00 [rank 3] three"]
    assert list(backend.logs("smoke", rank=3)) == ["three"]
    assert log_requests(pods) == [(THERE, None)]
    first, second = (
        ["[rank 0] zero", "[rank 1] one", f"[{HERE}] launch: joined"],
        ["[rank 2] two", f"[{THERE}] {words}"],
    )
    assert list(backend.logs("smoke")) == [*first, *second, "[rank 3] three"]
    with pytest.raises(UserError, match="ranks 0 … 3, got 4"):
        backend.logs("smoke", rank=4)


def test_a_pod_that_has_no_node_yet_has_no_log(backend: Any, cluster: Cluster, tmp_path: Path) -> None:
    backend.submit(SPEC)
    for name in (HERE, THERE):
        cluster.pod("smoke", name, {"phase": "Pending"})
    assert list(backend.logs("smoke", rank=0)) == []
    for more in ((), ("--tail", "3")):
        done = lockstep(tmp_path, "logs", "k8s", "smoke", *more)
        assert done.returncode == 2 and "smoke has no log yet: pending (0/2 pods run" in done.stderr, done


def test_the_last_lines_are_asked_of_the_server_where_it_knows_them(backend: Any, pods: Cluster) -> None:
    for hours, name, rank in ((2, HERE, 0), (-3.5, THERE, 2)):
        zone = timezone(timedelta(hours=hours))
        times = [datetime.fromtimestamp(1_767_225_600 + 4 * second + rank, zone) for second in range(10)]
        stamps = [time.isoformat(timespec="microseconds") for time in times]
        pods.logs[name] = [f"{stamp} [rank {rank}] {number}" for number, stamp in enumerate(stamps)]
    assert [*backend.logs("smoke", last=2)] == ["[rank 0] 8", "[rank 0] 9", "[rank 2] 8", "[rank 2] 9"], "of each pod"
    assert log_requests(pods) == [(HERE, "2"), (THERE, "2")]
    assert [*backend.logs("smoke", rank=2, last=2)] == ["8", "9"]
    assert log_requests(pods)[2:] == [(THERE, None)], "its lines are among those of others"


def test_a_log_is_followed_through_pending_broken_streams_and_a_new_pod(
    backend: Any, cluster: Cluster, operator: Operator
) -> None:
    """A log is followed while the pod is pending, through broken streams and a new pod. Its time stamps change their offset.
    No line is lost or doubled."""
    backend.submit(SPEC)
    operator.absent_pods.add(HERE)
    operator.round()
    began, here = datetime(2026, 11, 24, 23, 59, 57, tzinfo=timezone.utc), timezone(timedelta(minutes=-210))
    times = [began + timedelta(seconds=0.75 * number) for number in range(12)]
    stamps = [time.astimezone(here).isoformat(timespec="microseconds") for time in times[:6]]
    stamps += [f"{time:%Y-%m-%dT%H:%M:%S.%f}000Z" for time in times[6:]]  # the offset changes, as twice a year
    lines = [f"{stamp} [rank 0] {number}" for number, stamp in enumerate(stamps)]
    output: list[str] = []
    thread = threading.Thread(target=lambda: output.extend(backend.logs("smoke", rank=0, follow=True)), daemon=True)
    thread.start()
    cluster.faults.append(Fault("GET", "/log", drop_after_lines=3, times=2))
    cluster.logs[HERE] = lines[:9]
    operator.absent_pods.clear()
    operator.round()
    poll(lambda: cluster.faults[0].times == 0 and len(output) >= 9, 60, f"the first pod's lines; {output}")
    cluster.remove("pods", HERE)
    cluster.logs[HERE] = lines[9:]
    operator.round()
    poll(lambda: len(output) >= 12, 60, f"the second pod's lines; {output}")
    for pod in cluster.all("pods"):
        finish(cluster, pod, 0)
    operator.round()
    thread.join(20)
    assert not thread.is_alive() and output == [str(number) for number in range(12)], "no line twice, none missing"
