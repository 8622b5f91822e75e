"""The launcher of an elastic job: nodes that leave and come back, a network that is cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import product
from tests.events import events
from tests.processes import kill_inside, poll, require
from tests.ranks import launching
from tests.runs import Job
from tests.warm.gang import Gang

pytestmark = pytest.mark.promise("nodes")


def _node(job: Job, number: int, namespace: str) -> contextlib.AbstractContextManager[Gang]:
    """One launcher of an elastic job, inside a network namespace."""
    folder = job.run_dir.with_name(f"node-{number}")
    folder.mkdir(exist_ok=True)
    words = [
        "--ranks", "1", "--nodes", "1:2", "--max-restarts", "5", "--rendezvous", "10.213.0.1:29401",
        "--serve" if number == 0 else "--no-serve", "--address", f"10.213.0.{number + 1}", "--grace", "10", *job.words,
    ]  # fmt: skip
    pace = {"LOCKSTEP_TEST_PACE": "1", "LOCKSTEP_TEST_PACE_FILE": str(_slow(job))}
    env = job.env(**pace, GLOO_SOCKET_IFNAME=f"ls{number}")
    return launching(*words, env=env, cwd=folder, namespace=namespace)


EPOCHS = 15
"""120 steps: two minutes at the slow pace, seconds at the fast one."""


def _elastic_job(tmp_path: Path, data_root: Path) -> Job:
    return Job(
        tmp_path / "run", data_root, 1, model="tests.nets:Paced", precision="float64", epochs=EPOCHS,
        **{"evaluate.every": 1000, "collective_timeout": 15, "ema.decay": 0},
    )  # fmt: skip


def _slow(job: Job) -> Path:
    """While this file exists a step takes a second at least: the test acts on a run that is on its way."""
    return job.run_dir.parent / "slow"


def _worlds(job: Job) -> list[int]:
    return [event["world_size"] for event in events(job.run_dir, "start")]


def _steps(job: Job) -> int:
    return max((event["step"] for event in events(job.run_dir, "checkpoint")), default=0)


def _assert_close_to_one_rank(job: Job, tmp_path: Path, data_root: Path) -> None:
    """No batch statistics: an elastic run ends in the weights of one rank, up to the order of summation."""
    alone = _elastic_job(tmp_path / "alone", data_root)
    assert alone.go().code == 0
    final = f"checkpoints/step-{8 * EPOCHS:08d}"
    one, other = (product.checkpoint(j.run_dir / final)["shared"]["model"] for j in (job, alone))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-9)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by one cable, 10.213.0.1 and 10.213.0.2."""
    names = (f"lsa{os.getpid()}", f"lsb{os.getpid()}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    require(shutil.which("ip"), "needs iproute2, and root")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "ls0", "netns", names[0], "type", "veth", "peer", "name", "ls1", "netns", names[1])
        except subprocess.CalledProcessError as error:
            require(False, f"needs network namespaces and veth ({error.stderr.strip()}), and root")
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.0.{number + 1}/24", "dev", f"ls{number}")
            ip("-n", name, "link", "set", f"ls{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_node_whose_network_is_cut_costs_no_run_and_comes_back(tmp_path: Path, data_root: Path) -> None:
    """The other node trains on alone. When the cable is plugged in again a new launcher joins, and both end in the same weights."""
    job = _elastic_job(tmp_path, data_root)
    _slow(job).touch()
    with two_namespaces() as names:

        def cable(state: str) -> None:
            subprocess.run(["ip", "-n", names[1], "link", "set", "ls1", state], check=True)

        with _node(job, 0, names[0]) as one:
            with _node(job, 1, names[1]):
                poll(lambda: _worlds(job)[-1:] == [2] and _steps(job) >= 4, 240, "two nodes at work")
                cable("down")
                before = _steps(job)
                poll(lambda: _worlds(job)[-1:] == [1] and _steps(job) > before, 240, "the rest to train on")
                kill_inside(tmp_path / "node-1")
            cable("up")
            with _node(job, 1, names[1]) as again:
                poll(lambda: _worlds(job)[-1:] == [2], 240, "the node to be taken in")
                _slow(job).unlink()
                done = again.wait(300)
                assert done.code == 0, done.output
            done = one.wait(240)
            assert done.code == 0, done.output
    assert _worlds(job)[0] in (1, 2) and _worlds(job)[-3:] == [2, 1, 2], events(job.run_dir, "start", "resumed")
    _assert_close_to_one_rank(job, tmp_path, data_root)
