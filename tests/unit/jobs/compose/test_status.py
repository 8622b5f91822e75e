"""What the containers of a job mean."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.jobs.compose.status import status_from_containers
from lockstep.jobs.records import RunStatus
from tests.product import JobSpec

SPEC = JobSpec.of({"name": "small", "recipe": "smoke", "image": "lockstep:1-cpu", "nodes": 2, "ranks_per_node": 2})
STOPPED = RunStatus(code=75, step=7, attempt=1, reason="SIGTERM")
UNDER_WAY = RunStatus(code=None, step=7, attempt=1, reason="running")


def node(state: int | str | dict[str, Any]) -> dict[str, Any]:
    """A container that has ended with that code, or is in that state."""
    about = {"ExitCode": state} if isinstance(state, int) else {"Status": state} if isinstance(state, str) else state
    return {
        "State": {"Status": "exited", "ExitCode": 0, "StartedAt": "2026-01-01T00:00:00.5Z", **about},
        "Config": {"Hostname": "node-0"}, "HostConfig": {"Memory": 1 << 30},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "run_status", "state", "code"),
    [
        ([0, 0], None, "succeeded", 0), ([1, 75], None, "failed", 1), ([2, 1], None, "failed", 2),
        ([75, 75], None, "preempted", 75),
        ([124, 75], STOPPED, "timed_out", 124), ([1, 1], STOPPED, "preempted", 75),
        ([{"ExitCode": 137, "OOMKilled": True}, 1], None, "failed", 1),
        (["running", 0], UNDER_WAY, "running", 0), (["running", 137], None, "restarting", 0),
        (["running", "paused"], None, "running", 0), (["created", "created"], None, "pending", 0),
        ([{"Status": "created", "Error": "no such device"}, "created"], None, "failed", 1),
    ],
)  # fmt: skip
def test_what_containers_mean(nodes: list[Any], run_status: Any, state: str, code: int) -> None:
    status = status_from_containers([node(each) for each in nodes], SPEC, run_status)
    assert (status.state, status.code) == (state, code), status
    assert "OOMKilled" in status.reason or not any(isinstance(each, dict) and "OOMKilled" in each for each in nodes)
