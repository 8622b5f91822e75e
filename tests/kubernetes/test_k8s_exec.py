"""`pods/exec`: both channel protocols, what a server refuses, and connections that break."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster, Fault
from k8s_exec import V4, V5, Container

from lockstep.jobs.foreground import Streams
from lockstep.jobs.kubernetes import channels
from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Unreachable
from lockstep.training.contract import UserError
from tests.processes import clean_env


@pytest.fixture
def pods(backend: KubernetesBackend, cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """A job of two pods with one rank each; rank 1 is in the first pod, as it may be in an elastic job."""
    elastic = {"min_nodes": 2, "max_nodes": 2}
    values = {"name": "long", "command": ["true"], "image": "registry.example/a:1", "nodes": 2, "ranks_per_node": 1}
    backend.submit(JobSpec.of({**values, "elastic": elastic, "volumes": [{"claim": "runs", "path": "/runs"}]}))
    ranks = []
    for number in range(2):
        name = f"long-worker-{number}"
        env = {**clean_env(), "POD": name, "LOCKSTEP_JOB": f"{name}-of-{os.getpid()}"}
        cluster.containers.there[name] = Container(env, tmp_path)
        own = {"RANK": str(1 - number), "WORLD_SIZE": "2", "LOCKSTEP_LAUNCHER": "1"}
        ranks.append(subprocess.Popen(["sleep", "600"], env={**env, **own}, cwd=tmp_path))
        put(cluster, name, "Running")
    yield cluster
    for rank in ranks:
        rank.kill()
        rank.wait()


def put(cluster: Cluster, name: str, phase: str) -> None:
    meta = {"name": name, "labels": {"lockstep/job": "long"}}
    cluster.put("pods", {"metadata": meta, "spec": {"nodeName": "n"}, "status": {"phase": phase}})


def beside(
    backend: KubernetesBackend, folder: Path, *command: str, rank: int = 0, stdin: bytes = b""
) -> tuple[int, bytes, bytes]:
    names = [folder / f"stream-{name}" for name in ("in", "out", "err")]
    names[0].write_bytes(stdin)
    with names[0].open("rb") as source, names[1].open("wb") as out, names[2].open("wb") as err:
        code = backend.execute("long", [*command], rank, Streams(source.fileno(), out.fileno(), err.fileno()))
    return code, names[1].read_bytes(), names[2].read_bytes()


@pytest.mark.parametrize("protocols", [(V5, V4), (V4,)], ids=["v5", "v4"])
def test_bytes_and_exit_codes_pass_either_protocol(
    backend: KubernetesBackend, pods: Cluster, tmp_path: Path, protocols: tuple[str, ...]
) -> None:
    pods.containers.protocols = protocols
    data = os.urandom(5 << 20)
    code, out, err = beside(backend, tmp_path, "sh", "-c", "cat; echo over >&2; exit 9", stdin=data)
    assert (code, out == data, err) == (9, True, b"over\n")
    assert bool(pods.containers.closed) == (V5 in protocols), "v4 knows no end of input"
    code, out, err = beside(backend, tmp_path, "cat")
    assert (code, out, err) == (0, b"", b""), "no input at all ends, too"
    code, out, err = beside(backend, tmp_path, "sh", "-c", "exec <&-; echo done; exit 3", stdin=data)
    assert (code, out, err) == (3, b"done\n", b""), "what nobody reads keeps no exit code back"


def test_a_rank_of_an_elastic_job_is_looked_for(backend: KubernetesBackend, pods: Cluster, tmp_path: Path) -> None:
    for rank in (0, 1):
        code, out, _ = beside(backend, tmp_path, "sh", "-c", "echo $POD $RANK", rank=rank)
        assert (code, out.decode()) == (0, f"long-worker-{1 - rank} {rank}\n")
    put(pods, "long-worker-0", "Pending")
    with pytest.raises(UserError, match=r"rank 1 does not run: the pod long-worker-0 has not started"):
        beside(backend, tmp_path, "true", rank=1)


def test_a_connection_that_breaks_is_no_exit_code(backend: KubernetesBackend, pods: Cluster, tmp_path: Path) -> None:
    pods.faults.append(Fault("GET", r"long-worker-1/exec\?.*yes", drop_after_lines=3, times=1))
    with pytest.raises(Unreachable, match=r"the connection to long-worker-1 was lost: the command may still run"):
        beside(backend, tmp_path, "yes")
    assert (tmp_path / "stream-out").read_bytes().startswith(b"y\ny\n"), "what came before is there"


def test_a_quiet_connection_is_kept_alive(
    backend: KubernetesBackend, pods: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "PING_SECONDS", 0.2)
    assert beside(backend, tmp_path, "sleep", "1")[0] == 0
    assert pods.containers.pings >= 1


REFUSED: list[tuple[dict[str, Any], type[UserError], str]] = [
    ({"status": 500, "message": 'unable to upgrade connection: container not found ("pytorch")'}, UserError,
     r"cannot run a command in long-worker-1: .*container not found"),
    ({"status": 500, "message": "error dialing backend: dial tcp 10.0.0.7:10250: connect: no route to host"}, Unreachable,
     r"the node of long-worker-1 does not answer"),
    ({"status": 503, "message": "later"}, Unreachable, "later"),
    ({"status": 400, "message": "cannot exec into a container in a completed pod; current phase is Failed"}, UserError,
     "completed pod"),
    ({"drop": True}, Unreachable, "cannot be reached"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "said"), REFUSED, ids=["gone", "kubelet", "busy", "completed", "dropped"])
def test_what_a_server_refuses_is_one_line(
    backend: KubernetesBackend, pods: Cluster, tmp_path: Path, fault: dict[str, Any], kind: type[UserError], said: str
) -> None:
    pods.faults.append(Fault("GET", r"long-worker-1/exec\?.*marked", times=9, **fault))
    with pytest.raises(UserError, match=said) as caught:
        beside(backend, tmp_path, "echo", "marked")
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_a_command_that_the_node_cannot_start_is_one_line(
    backend: KubernetesBackend, pods: Cluster, tmp_path: Path
) -> None:
    """The connection is there by then, and what comes over it is no exit code."""
    one = JobSpec.of({"name": "one", "command": ["true"], "image": "registry.example/a:1", "ranks_per_node": 1})
    backend.submit(one)
    pods.containers.there["one-worker-0"] = Container({}, tmp_path / "gone")
    meta = {"name": "one-worker-0", "labels": {"lockstep/job": "one"}}
    pods.put("pods", {"metadata": meta, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}})
    with pytest.raises(UserError, match=r"cannot run a command in one-worker-0: failed to exec in container"):
        backend.execute("one", ["true"])


def test_without_the_right_it_says_which_component_gives_it(
    backend: KubernetesBackend, pods: Cluster, tmp_path: Path
) -> None:
    verbs = ["get", "list", "create", "watch"]
    pods.allow({"rules": [{"resources": ["pods", "pods/log", "events", "pytorchjobs"], "verbs": verbs}]})
    with pytest.raises(UserError, match=r"not allowed: .*deploy/k8s/components/debug"):
        beside(backend, tmp_path, "true")


def test_what_is_not_ours_is_left_alone(backend: KubernetesBackend, pods: Cluster, tmp_path: Path) -> None:
    live = pods.get("pytorchjobs", "long")
    assert live is not None
    live["metadata"]["labels"].clear()
    with pytest.raises(UserError, match="lockstep did not make long, and leaves it alone"):
        beside(backend, tmp_path, "true")
    assert not [path for _, path, _, _ in pods.requests if path.endswith("/exec")]


def test_the_last_lines_are_asked_of_the_server_where_it_knows_them(backend: KubernetesBackend, pods: Cluster) -> None:
    for number in range(2):
        lines = [f"2026-01-01T00:00:{2 * second + number:02d}Z [rank {number}] {second}" for second in range(20)]
        pods.logs[f"long-worker-{number}"] = lines
    both = [*backend.logs("long", last=3)]
    assert both == ["[rank 1] 18", "[rank 0] 19", "[rank 1] 19"], "by their times, whichever pod they are of"
    asked = [query.get("tailLines") for _, path, query, _ in pods.requests if path.endswith("/log")]
    assert asked == ["3", "3"]
    assert [*backend.logs("long", rank=1, last=2)] == ["18", "19"]
    asked = [query.get("tailLines") for _, path, query, _ in pods.requests if path.endswith("/log")]
    assert asked[2:] == [None, None], "its lines are among those of others"
