"""The operator's environment, emulated: 2 pods × 2 ranks train through the whole of submit, status, logs, wait."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from k8s_cluster import Cluster
from k8s_operator import Running, until
from safetensors.torch import load_file

from lockstep.jobs.kubernetes.backend import KubernetesBackend
from lockstep.jobs.spec.model import JobSpec
from lockstep.training.checkpoint import store
from tests.events import events
from tests.ranks import training

BOUND = 240


@pytest.fixture
def operator(cluster: Cluster, tmp_path: Path) -> Iterator[Running]:
    running = Running(cluster, tmp_path)
    yield running
    running.stop()


def smoke(tmp_path: Path, name: str, **more: Any) -> JobSpec:
    overrides = {
        "epochs": 3, "threads": 1, "data.root": str(tmp_path / "data"), "evaluate.every": 3, "checkpoint.every_steps": 4,
        "model": "tests.kubernetes.k8s_nets:PacedNormed", "model_options": {}, "checkpoint.keep": 50,
        "metrics.port": 0,  # the pods are on one machine: who comes second would warn
    }  # fmt: skip
    return JobSpec(
        name=name, recipe="smoke", overrides=overrides, image="registry.example/local:1", nodes=2, ranks_per_node=2, max_restarts=2,
        run_dir=str(tmp_path / name), volumes=[{"claim": "runs", "path": str(tmp_path)}], **more,
    )  # fmt: skip


@pytest.fixture
def slow(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file, and the environment of a run that takes its time as long as that file is there."""
    file = tmp_path / "slow"
    file.touch()
    return file, {"LOCKSTEP_TEST_PACE": "0.25", "LOCKSTEP_TEST_PACE_FILE": str(file)}


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    return {name: value for file in sorted(newest.glob("*.safetensors")) for name, value in load_file(file).items()}


def load(run_dir: Path) -> dict[str, torch.Tensor]:
    """The model's parameters by name."""
    return store.load(store.candidates(run_dir / "checkpoints")[0])["shared"]["model"]


def test_a_lost_pod_is_replaced_and_the_weights_are_those_of_the_undisturbed_run(
    backend: KubernetesBackend, operator: Running, tmp_path: Path, slow: tuple[Path, dict[str, str]]
) -> None:
    file, env = slow
    calm, stormy = smoke(tmp_path, "calm"), smoke(tmp_path, "stormy", env=env)
    assert backend.submit(calm).created
    found = backend.wait("calm", BOUND)
    assert found.state == "succeeded", (found, *backend.logs("calm"))
    assert found.ranks[0].ranks == [0, 1], "the operator may have taken the other pod away by now"
    assert backend.summary("calm")["world_size"] == 4
    assert [line for line in backend.logs("calm", rank=0) if not line.startswith("{")] == []

    backend.submit(stormy)
    until(lambda: events(tmp_path / "stormy", "checkpoint_written"), BOUND, "a checkpoint")
    operator.kubelet.lose("stormy-worker-0")  # rank 0, and the rendezvous with it
    file.unlink()
    found = backend.wait("stormy", BOUND)
    assert found.state == "succeeded", (found, *backend.logs("stormy"))
    assert operator.kubelet.starts["stormy-worker-0"] >= 2
    assert len(events(tmp_path / "stormy", "start")) >= 2, "training was not interrupted"
    assert any(event["step"] > 0 for event in events(tmp_path / "stormy", "start")), "training began anew"
    undisturbed, disturbed = weights(tmp_path / "calm"), weights(tmp_path / "stormy")
    assert undisturbed.keys() == disturbed.keys()
    for name, value in undisturbed.items():
        assert torch.equal(value, disturbed[name]), name


def test_an_elastic_job_that_loses_a_pod_ends_in_the_weights_of_the_undisturbed_run(
    backend: KubernetesBackend, operator: Running, tmp_path: Path, slow: tuple[Path, dict[str, str]]
) -> None:
    """The world size may change, so the weights agree up to the order of summation, without batch statistics."""
    file, env = slow
    spec = smoke(tmp_path, "elastic", elastic={"min_nodes": 1, "max_nodes": 2}, env=env)
    plain = {"model": "tests.nets:Paced", "precision": "float64", "optim.lr": 1e-4, "ema.decay": 0}
    spec = spec.model_copy(update={"overrides": {**spec.overrides, **plain}})
    backend.submit(spec)
    until(lambda: events(tmp_path / "elastic", "checkpoint_written"), BOUND, "a checkpoint")
    operator.kubelet.lose("elastic-worker-1")

    def whole_again() -> bool:
        starts = events(tmp_path / "elastic", "start")
        return len(starts) > 1 and starts[-1]["world_size"] == 4

    until(
        lambda: whole_again() or (tmp_path / "elastic/summary.json").exists(), BOUND, "the lost pod's successor joins"
    )
    file.unlink()
    found = backend.wait("elastic", BOUND)
    assert found.state == "succeeded", (found, *backend.logs("elastic"))
    assert json.loads((tmp_path / "elastic/summary.json").read_text())["steps"] == 36
    assert len(events(tmp_path / "elastic", "start")) >= 2, "training was not interrupted"
    words = [
        f"{name}={json.dumps(value) if isinstance(value, dict) else value}" for name, value in spec.overrides.items()
    ]
    alone = training("run", "smoke", "--run-dir", str(tmp_path / "alone"), "--set", *words)
    assert alone.code == 0, alone.output
    undisturbed, disturbed = (load(path) for path in (tmp_path / "alone", tmp_path / "elastic"))
    for name, value in undisturbed.items():
        torch.testing.assert_close(value, disturbed[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("program", "runs", "pods"),
    [
        ("sys.exit(2)", 1, 1),  # wrong usage: never again
        ("sys.exit(7)", 3, 1),  # a crash: restarted within the pod
        (
            "os.kill(os.getppid(), 9)",
            3,
            4,
        ),  # the launcher is killed: the pod is replaced; the fourth only reads the count
    ],
)
def test_max_restarts_hold_whatever_the_failure(
    backend: KubernetesBackend, operator: Running, tmp_path: Path, program: str, runs: int, pods: int
) -> None:
    """With ExitCode the operator itself would restart for ever."""
    program = f"import os, sys; open('{tmp_path}/runs', 'a').write('x'); {program}"
    spec = JobSpec(
        name="bad", command=["python", "-c", program], image="registry.example/local:1", max_restarts=2, run_dir=str(tmp_path / "bad"),
        volumes=[{"claim": "runs", "path": str(tmp_path)}],
    )  # fmt: skip
    backend.submit(spec)
    found = backend.wait("bad", BOUND)
    assert found.state == "failed", found
    assert found.code == (2 if "exit(2)" in program else 1)
    assert (tmp_path / "runs").read_text() == "x" * runs
    assert operator.kubelet.starts["bad-worker-0"] == pods
    assert not list((tmp_path / "bad/restarts").glob("*.json")), (
        "the next job of this name would begin with an old count"
    )


@pytest.mark.parametrize(("ending", "state", "code"), [("0", "succeeded", 0), ("2", "failed", 2)])
def test_the_first_worker_that_is_done_takes_no_line_and_no_failure_away(
    backend: KubernetesBackend, operator: Running, tmp_path: Path, ending: str, state: str, code: int
) -> None:
    """The operator ends a job of workers with the first that completes, and deletes the pods of the others."""
    program = f"""
    test $RANK = 1 && touch {tmp_path}/done && exit 0
    while ! test -e {tmp_path}/go; do sleep 0.05; done
    echo the last line; exit {ending}"""
    spec = JobSpec(
        name="late", command=["sh", "-c", program], image="registry.example/a:1", nodes=2, max_restarts=0,
        run_dir=str(tmp_path / "late"),
    )  # fmt: skip
    assert backend.submit(spec).created
    until((tmp_path / "done").exists, BOUND, "the other worker's end")
    assert backend.status("late").state == "running"
    (tmp_path / "go").touch()
    found = backend.wait("late", BOUND)
    assert (found.state, found.code) == (state, code), found
    assert "the last line" in list(backend.logs("late", rank=0))
    assert operator.kubelet.starts == {"late-worker-0": 1, "late-worker-1": 1}


def test_a_worker_that_comes_late_costs_no_restart(
    backend: KubernetesBackend, operator: Running, cluster: Cluster, tmp_path: Path
) -> None:
    """Its image is being pulled. The others' launchers wait, and a minute's bound on one question is no end of that."""
    operator.held.add("slow-worker-0")  # rank 0's, and the rendezvous with it
    spec = JobSpec(
        name="slow", command=["sh", "-c", "echo rank $RANK"], image="registry.example/a:1", nodes=2, max_restarts=1,
        run_dir=str(tmp_path / "slow"),
    )  # fmt: skip
    backend.submit(spec)
    until(lambda: operator.kubelet.starts.get("slow-worker-1"), BOUND, "the other worker")
    waits = operator.kubelet.pods["slow-worker-1"].process
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(5)
    operator.held.clear()
    assert backend.wait("slow", BOUND).state == "succeeded", list(backend.logs("slow"))
    assert operator.kubelet.starts == {"slow-worker-0": 1, "slow-worker-1": 1}


def test_a_restricted_namespace_runs_what_is_rendered_by_default(
    backend: KubernetesBackend, cluster: Cluster, operator: Running, tmp_path: Path
) -> None:
    """Not so a Master's workers: the operator's init container has no security context."""
    cluster.security = "restricted"
    spec = JobSpec(
        name="plain", command=["true"], image="registry.example/a:1", nodes=2, run_dir=str(tmp_path / "plain")
    )
    backend.submit(spec)
    assert backend.wait("plain", BOUND).state == "succeeded"
    other = JobSpec.of({**spec.plain(), "name": "master", "run_dir": str(tmp_path / "other"), "k8s": {"master": True}})
    backend.submit(other)
    until(lambda: "PodSecurity" in backend.status("master").reason, BOUND, "the refusal")
    assert "init-pytorch" in backend.status("master").reason
    backend.cancel("master")
