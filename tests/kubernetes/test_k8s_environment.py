"""Training in the operator's emulated environment: 2 pods × 2 ranks, with submit, status, logs and wait."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster
from k8s_operator import Running

from tests.events import events, weights_digest
from tests.processes import poll
from tests.product import JobSpec
from tests.ranks import gang

BOUND = 240
pytestmark = pytest.mark.promise("k8s-runs")


def smoke(tmp_path: Path, name: str, **more: Any) -> JobSpec:
    overrides = {
        "epochs": 3, "threads": 1, "data.root": str(tmp_path / "data"), "evaluate.every": 3, "checkpoint.every_steps": 4,
        "model": "tests.nets:PacedNormed", "model_options": {}, "checkpoint.keep": 50,
        **more.pop("overrides", {}),
    }  # fmt: skip
    env = {
        "LOCKSTEP_METRICS_PORT": "0",
        **more.pop("env", {}),
    }  # the pods are on one machine: the second one would warn
    values = {
        "name": name,
        "recipe": "smoke",
        "overrides": overrides,
        "ranks_per_node": 2,
        "max_restarts": 2,
        "env": env,
    }
    return JobSpec.of({**values, **placed(tmp_path, name), **more})


def placed(tmp_path: Path, name: str) -> dict[str, Any]:
    volumes = [{"claim": "runs", "path": str(tmp_path)}]
    return {"image": "localhost:5000/local:1", "nodes": 2, "run_dir": str(tmp_path / name), "volumes": volumes}


def program(tmp_path: Path, name: str, *command: str, **more: Any) -> JobSpec:
    values = {"name": name, "command": [*command], "max_restarts": 0}
    return JobSpec.of({**values, **placed(tmp_path, name), **more})


def trained_here(spec: JobSpec, run_dir: Path, ranks: int) -> str:
    """Trains the same job without a cluster. Returns the sha256 of its weights."""
    done = gang(ranks, "run", "smoke", "--run-dir", str(run_dir), "--set", *spec.assignments())
    assert done.code == 0, done.output
    return weights_digest(run_dir)


@pytest.mark.promise("kill-resume")
def test_a_lost_pod_is_replaced_and_the_weights_are_those_of_the_undisturbed_run(
    backend: Any, running: Running, tmp_path: Path
) -> None:
    """The pod of rank 0 is lost after a checkpoint. All ranks start again from it."""
    file = tmp_path / "slow"
    file.touch()
    env = {
        "LOCKSTEP_TEST_PACE": "0.25",
        "LOCKSTEP_TEST_PACE_FILE": str(file),
    }  # training is slow as long as the file exists
    spec = smoke(tmp_path, "stormy", env=env)
    assert backend.submit(spec).created
    poll(lambda: events(tmp_path / "stormy", "checkpoint_written"), BOUND, "a checkpoint")
    running.kubelet.lose("stormy-worker-0")  # rank 0, and the rendezvous with it
    file.unlink()
    status = backend.wait("stormy", BOUND)
    assert status.state == "succeeded", (status, *backend.logs("stormy"))
    assert running.kubelet.starts["stormy-worker-0"] >= 2
    starts = [event["step"] for event in events(tmp_path / "stormy", "start")]
    assert len(starts) >= 2 and max(starts) > 0, "training was not interrupted, or began anew"
    assert status.ranks[0].ranks == [0, 1], "the operator may have taken the other pod away by now"
    assert backend.summary("stormy")["world_size"] == 4
    assert [line for line in backend.logs("stormy", rank=0) if not line.startswith("{")] == []
    assert status.goodput is not None and 0 < status.goodput["fraction"] < 1 and status.goodput["restarts"] >= 1
    assert weights_digest(tmp_path / "stormy") == trained_here(spec, tmp_path / "calm", 4)


@pytest.mark.promise("survivors")
def test_the_others_train_on_while_a_lost_pod_is_replaced(backend: Any, running: Running, tmp_path: Path) -> None:
    """`live: true`: the operator replaces only the lost pod, and the new pod takes its ranks."""
    run, slow = tmp_path / "live", tmp_path / "slow"
    slow.touch()
    env = {"LOCKSTEP_TEST_PACE": "1", "LOCKSTEP_TEST_PACE_FILE": str(slow)}
    exact = {"sync.name": "exact", "sync.options.parts": 4, "epochs": 20, "evaluate.every": 20, "log.every": 1}
    spec = smoke(tmp_path, "live", live=True, overrides=exact, env=env)
    backend.submit(spec)
    poll(lambda: len(events(run, "step")) >= 2, BOUND, "steps of all ranks")
    running.kubelet.lose("live-worker-1")
    poll(lambda: "2 of 4 ranks" in backend.status("live").reason, BOUND, "the loss of a node")
    assert backend.status("live").state == "running"
    assert len([*(run / "restarts").iterdir()]) == 1, "the first pod counts for all"
    poll(lambda: len(events(run, "rank_joined")) == 2, BOUND, "the ranks of the new pod")
    slow.unlink()
    status = backend.wait("live", BOUND)
    assert status.state == "succeeded", (status, *backend.logs("live"))
    assert status.goodput is not None and status.goodput["restarts"] == 0
    assert sorted(event["rank"] for event in events(run, "rank_lost")) == [2, 3]
    assert len(events(run, "start")) == 1 and running.kubelet.starts["live-worker-0"] == 1, "nobody else was restarted"
    assert weights_digest(run) == trained_here(spec, tmp_path / "whole", 1)


ENDINGS: dict[str, tuple[str, str, int, int, int]] = {  # → state, exit code, runs, pods
    "usage": ("sys.exit(2)", "failed", 2, 1, 1),  # never again
    "crash": ("sys.exit(7)", "failed", 1, 3, 1),  # restarted within the pod
    "preempted": ("sys.exit(75 if count < 4 else 0)", "succeeded", 0, 4, 4),  # costs nothing
    "killed": ("os.kill(os.getppid(), 9)", "failed", 1, 3, 4),  # the launcher: the fourth pod only reads the count
}


@pytest.mark.promise("restarts")
@pytest.mark.parametrize("ending", ENDINGS)
def test_max_restarts_hold_whatever_the_failure(backend: Any, running: Running, tmp_path: Path, ending: str) -> None:
    """A job fails in four ways. It is restarted as often as `max_restarts` allows; the operator's rule alone has no limit."""
    ends, state, code, runs, pods = ENDINGS[ending]
    counts = tmp_path / "bad/restarts"
    text = f"import os, sys; file = open('{tmp_path}/runs', 'a'); file.write('x'); file.flush(); count = file.tell(); {ends}"
    backend.submit(program(tmp_path, "bad", "python", "-c", text, nodes=1, max_restarts=2, ranks_per_node=1))
    status = backend.wait("bad", BOUND)
    assert (status.state, status.code) == (state, code), (status, *backend.logs("bad"))
    assert (tmp_path / "runs").read_text() == "x" * runs
    assert running.kubelet.starts["bad-worker-0"] == pods
    assert not list(counts.glob("*.json")), "the next job of this name would begin with an old count"


def test_the_first_worker_that_is_done_takes_no_line_and_no_failure_away(
    backend: Any, running: Running, tmp_path: Path
) -> None:
    """The operator ends a job with the first worker that completes, and deletes the other pods."""
    text = f"""
    test $RANK = 1 && touch {tmp_path}/done && exit 0
    while ! test -e {tmp_path}/go; do sleep 0.05; done
    echo the last line; exit 2"""
    assert backend.submit(program(tmp_path, "late", "sh", "-c", text)).created
    poll((tmp_path / "done").exists, BOUND, "the other worker's end")
    assert backend.status("late").state == "running"
    (tmp_path / "go").touch()
    status = backend.wait("late", BOUND)
    assert (status.state, status.code) == ("failed", 2), status
    assert "the last line" in list(backend.logs("late", rank=0))
    assert running.kubelet.starts == {"late-worker-0": 1, "late-worker-1": 1}


@pytest.mark.promise("nodes", "k8s-render")
def test_a_worker_that_comes_late_costs_no_restart(
    backend: Any, running: Running, cluster: Cluster, tmp_path: Path
) -> None:
    """The first worker's image is still pulled. The other launcher waits for longer than one request's timeout. No restart counts."""
    cluster.restricted = True  # the namespace runs what is rendered by default
    running.absent_pods.add("slow-worker-0")  # the pod of rank 0, with the rendezvous
    backend.submit(program(tmp_path, "slow", "sh", "-c", "echo rank $RANK", max_restarts=1))
    poll(lambda: running.kubelet.starts.get("slow-worker-1"), BOUND, "the other worker")
    waits = running.kubelet.pods["slow-worker-1"].process
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(5)
    running.absent_pods.clear()
    assert backend.wait("slow", BOUND).state == "succeeded", list(backend.logs("slow"))
    assert running.kubelet.starts == {"slow-worker-0": 1, "slow-worker-1": 1}
