"""Logs of nodes whose clocks are not on UTC: a runtime stamps its lines with the node's offset, and the server passes that on."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from k8s_cluster import Cluster, Fault
from k8s_operator import Operator, finish, until

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec

SPEC = JobSpec.of({"name": "smoke", "recipe": "smoke", "image": "registry.example/lockstep:1", "nodes": 2})
HERE = "smoke-worker-0"


@pytest.mark.parametrize("minutes", [120, -210, 0], ids=["+02:00", "-03:30", "+00:00"])
def test_a_log_is_followed_over_streams_that_break(
    backend: KubernetesBackend, cluster: Cluster, operator: Operator, minutes: int
) -> None:
    """The offset was cut off: what was asked for next lay hours ahead, and 3 of 9 lines came."""
    backend.submit(SPEC)
    operator.round()
    began, here = datetime(2026, 11, 24, 23, 59, 57, tzinfo=timezone.utc), timezone(timedelta(minutes=minutes))
    times = [began + timedelta(seconds=0.75 * number) for number in range(9)]
    stamps = [time.astimezone(here).isoformat(timespec="microseconds") for time in times[:6]]
    stamps += [f"{time:%Y-%m-%dT%H:%M:%S.%f}000Z" for time in times[6:]]  # the clock is set anew, as twice a year
    cluster.logs[HERE] = [f"{stamp} [rank 0] {number}" for number, stamp in enumerate(stamps)]
    cluster.faults.append(Fault("GET", "/log", drop_after_lines=3, times=2))
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.extend(backend.logs("smoke", rank=0, follow=True)), daemon=True)
    thread.start()
    until(lambda: cluster.faults[0].times == 0 and len(seen) >= 9, 20, f"all lines; {seen}")
    for pod in cluster.all("pods"):
        finish(cluster, pod, 0)
    operator.round()
    thread.join(20)
    assert not thread.is_alive() and seen == [str(number) for number in range(9)], "no line twice, none missing"


def test_the_last_lines_of_several_nodes(backend: KubernetesBackend, cluster: Cluster, operator: Operator) -> None:
    backend.submit(SPEC)
    operator.round()
    cluster.logs[HERE] = [f"2026-01-01T02:00:0{number}.0+02:00 [rank 0] {number}" for number in (0, 2, 4)]
    cluster.logs["smoke-worker-1"] = [f"2025-12-31T20:30:0{number}.0-03:30 [rank 1] {number}" for number in (1, 3, 5)]
    assert [line[-1] for line in backend.logs("smoke", last=4)] == ["2", "3", "4", "5"]


def test_a_line_without_a_time_is_shown_whole(backend: KubernetesBackend, cluster: Cluster, operator: Operator) -> None:
    """A kubelet's own words, in place of a log that it cannot read."""
    backend.submit(SPEC)
    operator.round()
    words = "unable to retrieve container logs for containerd://1f2e"
    cluster.logs[HERE] = ["2026-01-01T02:00:00.0+02:00 a", words]
    cluster.logs["smoke-worker-1"] = []
    assert list(backend.logs("smoke")) == [f"[{HERE}] a", f"[{HERE}] {words}"]
