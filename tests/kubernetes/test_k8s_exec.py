"""`pods/exec`: channels, what a server refuses, and connections that break."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_exec import V4, Container

from tests import product
from tests.processes import clean_env
from tests.product import JobSpec, Unreachable, UserError

pytestmark = pytest.mark.promise("exec")


@pytest.fixture
def pods(backend: Any, cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """A job of two pods with one rank each."""
    backend.submit(JobSpec.of({"name": "long", "command": ["true"], "image": "localhost:5000/a:1", "nodes": 2}))
    with ExitStack() as ranks:
        for number in range(2):
            name = f"long-worker-{number}"
            env = {**clean_env(), "POD": name, "LOCKSTEP_JOB": f"{name}-of-{os.getpid()}"}
            cluster.containers.there[name] = Container(env, tmp_path)
            own = {"RANK": str(number), "WORLD_SIZE": "2", "LOCKSTEP_LAUNCHER": "1"}
            rank = ranks.enter_context(subprocess.Popen(["sleep", "600"], env={**env, **own}, cwd=tmp_path))
            ranks.callback(rank.kill)
            put(cluster, name, "Running")
        yield cluster


def put(cluster: Cluster, name: str, phase: str, job: str = "long") -> None:
    cluster.pod(job, name, {"phase": phase}, spec={"nodeName": "n"})


def beside(backend: Any, folder: Path, *command: str, rank: int = 0, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    names = [folder / f"stream-{name}" for name in ("in", "out", "err")]
    names[0].write_bytes(stdin)
    with names[0].open("rb") as source, names[1].open("wb") as out, names[2].open("wb") as err:
        code = product.execute(backend, "long", [*command], rank, (source, out, err))
    return code, names[1].read_bytes(), names[2].read_bytes()


def test_a_server_that_cannot_say_where_input_ends_is_refused(backend: Any, pods: Cluster, tmp_path: Path) -> None:
    pods.containers.protocols = (V4,)
    with pytest.raises(UserError, match=r"exec needs Kubernetes 1\.30"):
        beside(backend, tmp_path, "true")


def test_a_command_runs_in_the_pod_of_its_rank(backend: Any, pods: Cluster, tmp_path: Path) -> None:
    for rank in (0, 1):
        code, out, _ = beside(backend, tmp_path, "sh", "-c", "echo $POD $RANK", rank=rank)
        assert (code, out.decode()) == (0, f"long-worker-{rank} {rank}\n")
    put(pods, "long-worker-1", "Pending")
    with pytest.raises(UserError, match="long has not started: pending"):
        beside(backend, tmp_path, "true", rank=1)


def test_a_connection_that_breaks_is_no_exit_code(backend: Any, pods: Cluster, tmp_path: Path) -> None:
    pods.faults.append(Fault("GET", r"long-worker-0/exec\?.*yes", drop_after_lines=3, times=1))
    with pytest.raises(Unreachable, match="long-worker-0 was lost"):
        beside(backend, tmp_path, "yes")
    assert (tmp_path / "stream-out").read_bytes().startswith(b"y\ny\n"), "what came before is there"


REFUSED: dict[str, tuple[dict[str, Any], type[UserError], str]] = {
    "kubelet": (
        {"status": 500, "message": "error dialing backend: no route"},
        Unreachable,
        "the node of long-worker-0",
    ),
    "busy": ({"status": 503, "message": "later"}, Unreachable, "later"),
    "dropped": ({"drop": True}, Unreachable, "cannot be reached"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_refuses_is_one_line(backend: Any, pods: Cluster, tmp_path: Path, case: str) -> None:
    fault, kind, told = REFUSED[case]
    pods.faults.append(Fault("GET", r"long-worker-0/exec\?.*marked", times=9, **fault))
    with pytest.raises(UserError, match=told) as caught:
        beside(backend, tmp_path, "echo", "marked")
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_what_cannot_be_run_is_refused(backend: Any, pods: Cluster, tmp_path: Path) -> None:
    backend.submit(JobSpec.of({"name": "one", "command": ["true"], "image": "localhost:5000/a:1"}))
    put(pods, "one-worker-0", "Running", "one")
    with pytest.raises(UserError, match=r"one-worker-0: .*container not running \(one-worker-0\)"):
        backend.execute("one", ["true"])  # it has ended since the pod was looked at
    pods.containers.there["one-worker-0"] = Container({}, tmp_path / "gone")
    with pytest.raises(
        UserError, match="one-worker-0: .*error executing command in container"
    ):  # the connection is there by then
        backend.execute("one", ["true"])
    verbs = ["get", "list", "create", "watch"]
    pods.allow({"rules": [{"resources": ["pods", "pods/log", "events", "pytorchjobs"], "verbs": verbs}]})
    with pytest.raises(UserError, match="deploy/k8s/components/debug"):
        beside(backend, tmp_path, "true")
    pods.get("pytorchjobs", "long")["metadata"]["labels"].clear()
    pods.requests.clear()
    with pytest.raises(UserError, match="did not make long"):
        beside(backend, tmp_path, "true")
    assert not [path for _, path, *_ in pods.requests if path.endswith("/exec")]
