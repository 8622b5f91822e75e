"""The same run under every launcher, and what a killed rank costs under each: nothing, when it is run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.processes import PYTHON, free_port, run
from tests.runs import Job, assert_same
from tests.sync.test_mpi import mpiexec_command, need_open_mpi

BIN = Path(PYTHON).parent
LAUNCHERS = {
    "torchrun": lambda: [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "lockstep.training"],
    "torch.distributed.launch": lambda: [
        PYTHON, "-m", "torch.distributed.launch", "--master-port", str(free_port()), "--nproc-per-node", "2", "-m",
        "lockstep.training",
    ],
    "mpiexec": lambda: [*mpiexec_command(2), "-m", "lockstep.training"],
}  # fmt: skip
"""`training launch` is in tests/faults, srun in tests/slurm, `lockstep run` in tests/training."""


@pytest.mark.parametrize("name", LAUNCHERS)
def test_killed_and_run_again_under(name: str, undisturbed: Undisturbed, tmp_path: Path, data_root: Path) -> None:
    if name == "mpiexec":
        need_open_mpi()
    job = Job(tmp_path / "run", data_root, 2)
    died = run([*LAUNCHERS[name](), *job.words], job.env(LOCKSTEP_TEST_FATE="1:9:KILL"))
    assert died.code != 0 and job.steps()[0] >= 4, died.output
    done = run([*LAUNCHERS[name](), *job.words], job.env())
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert "2 ranks on cpu, 1 thread a rank" in done.output and done.output.count("Final validation accuracy") == 1
    job.assert_gone()
    assert_same(job.run_dir, undisturbed(2))


SPAWNING = """
import os
import torch.multiprocessing as mp
from lockstep.training.__main__ import main

def work(rank, words):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r})
    assert main(words) == 0

if __name__ == "__main__":
    mp.spawn(work, ({words!r},), nprocs=2)
"""


def test_a_script_that_spawns_its_own_ranks(tiny: list[str], tmp_path: Path) -> None:
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny]
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING.format(port=str(free_port()), words=words))
    done = run([PYTHON, str(script)])
    assert done.code == 0, done.output
    assert json.loads((tmp_path / "run/summary.json").read_text())["world_size"] == 2
