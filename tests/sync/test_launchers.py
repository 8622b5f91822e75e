"""The same run under every launcher. A killed rank costs nothing under any: tests/own shows it for all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.processes import PYTHON, free_port, run
from tests.runs import Job, assert_same
from tests.sync.test_mpi import mpiexec_command, need_open_mpi

pytestmark = pytest.mark.promise("launchers")

SPAWNING = """
import os, runpy, sys
import torch.multiprocessing as mp

def work(rank, words, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    sys.argv = ["training", *words]
    try:
        runpy.run_module("lockstep.training", run_name="__main__")
    except SystemExit as end:
        assert not end.code

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[2:], sys.argv[1]), nprocs=2)
"""
LAUNCHERS = {
    "torch.distributed.launch": lambda: [
        PYTHON, "-m", "torch.distributed.launch", "--master-port", str(free_port()), "--nproc-per-node", "2", "-m",
        "lockstep.training",
    ],
    "mpiexec": lambda: [*mpiexec_command(2), "-m", "lockstep.training"],
    "mp.spawn": lambda: [PYTHON, "spawning.py", str(free_port())],
}  # fmt: skip
"""`training launch` is in tests/faults, srun in tests/slurm, `lockstep run` in tests/training, torchrun below and in tests/own."""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_run_is_the_same_under(name: str, undisturbed: Undisturbed, tmp_path: Path, data_root: Path) -> None:
    if name == "mpiexec":
        need_open_mpi()
    (tmp_path / "spawning.py").write_text(SPAWNING)
    job = Job(tmp_path / "run", data_root, 2)
    done = run([*LAUNCHERS[name](), *job.words], job.env(), cwd=tmp_path)
    assert done.code == 0 and done.output.count("Final validation accuracy") == 1, done.output
    assert "2 ranks on cpu, 1 thread a rank" in done.output, done.output
    job.assert_gone()
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("kill-resume")
def test_killed_and_run_again_under_torchrun(undisturbed: Undisturbed, tmp_path: Path, data_root: Path) -> None:
    torchrun = [
        str(Path(PYTHON).parent / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lockstep.training",
    ]
    job = Job(tmp_path / "run", data_root, 2)
    died = run([*torchrun, *job.words], job.env(LOCKSTEP_TEST_FATE="1:9:KILL"))
    assert died.code != 0 and job.steps()[0] >= 4, died.output
    done = run([*torchrun, *job.words], job.env())
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    job.assert_gone()
    assert_same(job.run_dir, undisturbed(2))
    assert json.loads((job.run_dir / "summary.json").read_text())["world_size"] == 2
