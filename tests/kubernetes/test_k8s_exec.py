"""`lockstep exec` through `kubectl exec`: the pod of a rank, and failures of kubectl."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster

from tests.jobs.test_jobs_contract import Bench, run_in_rank
from tests.processes import clean_env
from tests.product import JobSpec, Unreachable, UserError

pytestmark = pytest.mark.promise("exec")


@pytest.fixture
def pods(backend: Any, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A job of two pods with one rank each."""
    monkeypatch.setenv("PATH", cluster.kubectl.path)
    backend.submit(JobSpec.of({"name": "long", "command": ["true"], "image": "localhost:5000/a:1", "nodes": 2}))
    with ExitStack() as ranks:
        for number in range(2):
            name = f"long-worker-{number}"
            env = {**clean_env(), "POD": name, "LOCKSTEP_JOB": f"{name}-of-{os.getpid()}"}
            cluster.kubectl.put(name, env, tmp_path)
            rank_env = {"RANK": str(number), "WORLD_SIZE": "2", "LOCKSTEP_LAUNCHER": "1"}
            rank = ranks.enter_context(subprocess.Popen(["sleep", "600"], env={**env, **rank_env}, cwd=tmp_path))
            ranks.callback(rank.kill)
            put(cluster, name, "Running")
        yield cluster


def put(cluster: Cluster, name: str, phase: str) -> None:
    cluster.pod("long", name, {"phase": phase}, spec={"nodeName": "n"})


def test_a_command_runs_in_the_pod_of_its_rank(backend: Any, pods: Cluster, tmp_path: Path) -> None:
    for rank in (0, 1):
        code, out, _ = run_in_rank(Bench(backend, tmp_path), "long", "sh", "-c", "echo $POD $RANK", rank=rank)
        assert (code, out.decode()) == (0, f"long-worker-{rank} {rank}\n")
    result = run_in_rank(Bench(backend, tmp_path), "long", "sh", "-c", "printf oh >&2; exit 7")
    assert result[0] == 7 and result[2].startswith(b"oh"), "an exit code, whatever the last line of errors looks like"
    put(pods, "long-worker-1", "Pending")
    with pytest.raises(UserError, match="long does not run: pending"):
        run_in_rank(Bench(backend, tmp_path), "long", "true", rank=1)


FAILURES: dict[str, tuple[str, type[UserError], str]] = {
    "no right": (
        'Error from server (Forbidden): pods "long-worker-0" is forbidden: cannot create resource "pods/exec"',
        UserError, "deploy/k8s/components/debug",
    ),
    "lost": ("error: error reading from error stream: websocket: close 1006: unexpected EOF", Unreachable, "was lost"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_of_kubectl_is_no_exit_code(backend: Any, pods: Cluster, tmp_path: Path, case: str) -> None:
    stderr, kind, message = FAILURES[case]
    pods.kubectl.put("long-worker-0", {}, tmp_path, stderr, "before")
    with pytest.raises(UserError, match=message) as caught:
        run_in_rank(Bench(backend, tmp_path), "long", "true")
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert (tmp_path / "beside-out").read_bytes() == b"before\n", "what came before is there"
    assert stderr in (tmp_path / "beside-err").read_text(), "kubectl's own words"


def test_what_cannot_be_run_is_refused(
    backend: Any, pods: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pods.kubectl.folder / "long-worker-0.json").unlink()
    with pytest.raises(UserError, match="cannot run a command in long-worker-0"):
        run_in_rank(Bench(backend, tmp_path), "long", "true")  # the container ended after the status request
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="kubectl is not on PATH"):
        run_in_rank(Bench(backend, tmp_path), "long", "true")
    pods.get("pytorchjobs", "long")["metadata"]["labels"].clear()
    with pytest.raises(UserError, match="did not make long"):
        run_in_rank(Bench(backend, tmp_path), "long", "true")
