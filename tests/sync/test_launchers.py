"""The same run under launchers of others. A killed rank costs nothing under any: tests/own shows it under torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.processes import PYTHON, ROOT, clean_env, free_port, require, run
from tests.runs import Job, assert_same

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


def _mpiexec() -> list[str]:
    """Of a real Open MPI, with two ranks."""
    require(shutil.which("mpiexec"), "there is no mpiexec: install Open MPI (Debian: openmpi-bin)")
    told = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, timeout=60).stdout
    require("Open MPI" in told or "OpenRTE" in told, "mpiexec is not Open MPI's")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Open MPI binds each rank to a core of its own, and mistakes a container's share for the whole machine.
    return ["mpiexec", *root, "--oversubscribe", "--bind-to", "none", "-np", "2", PYTHON]


LAUNCHERS = {
    "mpiexec": lambda: [*_mpiexec(), "-m", "lockstep.training"],
    "mp.spawn": lambda: [PYTHON, "spawning.py", str(free_port())],
}
"""`training launch` is in tests/faults, srun in tests/slurm, `lockstep run` in tests/training, torchrun in tests/own."""


@pytest.mark.promise("launchers")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_run_is_the_same_under(name: str, undisturbed: Undisturbed, tmp_path: Path, data_root: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    job = Job(tmp_path / "run", data_root, 2)
    done = run([*LAUNCHERS[name](), *job.words], job.env(), cwd=tmp_path)
    assert done.code == 0 and done.output.count("Final validation accuracy") == 1, done.output
    assert "2 ranks on cpu, 1 thread a rank" in done.output, done.output
    job.assert_gone()
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("launchers")
def test_a_rank_that_fails_under_mpiexec_ends_all_and_costs_nothing(
    undisturbed: Undisturbed, tmp_path: Path, data_root: Path
) -> None:
    job = Job(tmp_path / "run", data_root, 2)
    done = run([*LAUNCHERS["mpiexec"](), *job.words], job.env(LOCKSTEP_TEST_FATE="1:7:KILL"), cwd=tmp_path)
    job.assert_gone()
    assert done.code not in (0, 2, 75), done.output
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("horovod", "modules", "own-script")
def test_the_resnet9_script_under_mpiexec() -> None:
    """A script of Horovod's prints what its module prints."""
    words = ["--data", "digits", "--width", "4", "--epochs", "2", "--log-every", "5"]
    done = run([*_mpiexec(), str(ROOT / "examples/modules/horovod_resnet9.py"), *words], clean_env(), 180)
    assert done.code == 0 and "12 batches of 128, 64 on this rank" in done.output, done.output
    found = re.findall(r"^acc: (\d\.\d+); avg_loss: (\d+\.\d+)$", done.output, re.M)
    assert len(found) == 6 and float(found[-1][0]) > 0.6 and float(found[-1][1]) < float(found[0][1]), done.output
    assert len(re.findall(r"^Training Time: \d+\.\d+ s$", done.output, re.M)) == 1
