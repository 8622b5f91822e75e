"""The same run under other launchers. A killed rank costs nothing under any: tests/own shows this under torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import Undisturbed
from tests.processes import PYTHON, ROOT, assert_none_inside, clean_env, free_port, require, run
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
    """Returns the command of a real Open MPI, with two ranks."""
    require(shutil.which("mpiexec"), "there is no mpiexec: install Open MPI (Debian: openmpi-bin)")
    version = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, timeout=60).stdout
    require("Open MPI" in version or "OpenRTE" in version, "mpiexec is not Open MPI's")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Open MPI binds each rank to one core, and mistakes a container's share for the whole machine.
    return ["mpiexec", *root, "--oversubscribe", "--bind-to", "none", "-np", "2", PYTHON]


BY_HAND = """
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$0
RANK=0 LOCAL_RANK=0 "$@" & other=$!
RANK=1 LOCAL_RANK=1 "$@" && wait $other
"""
LAUNCHERS = {
    "a shell": lambda: ["sh", "-c", BY_HAND, str(free_port()), PYTHON, "-m", "lockstep.training"],
    "mpiexec": lambda: [*_mpiexec(), "-m", "lockstep.training"],
    "mp.spawn": lambda: [PYTHON, "spawning.py", str(free_port())],
}
"""`training launch` is in tests/faults, srun in tests/slurm, `lockstep run` in tests/training, torchrun in tests/own."""


@pytest.mark.promise("launchers")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_the_run_is_the_same_under(name: str, undisturbed: Undisturbed, tmp_path: Path, data_root: Path) -> None:
    """The ranks train the weights of forked ranks, which most tests use. Under mpiexec a rank is killed first: all ranks end, and the
    same command resumes the run."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    job = Job(tmp_path / "run", data_root, 2)
    command = [*LAUNCHERS[name](), *job.words]
    if name == "mpiexec":
        killed = run(command, job.env(LOCKSTEP_TEST_FATE="1:7:KILL"), cwd=tmp_path)
        assert_none_inside(tmp_path)
        assert killed.code not in (0, 2, 75), killed.output
    done = run(command, job.env(), cwd=tmp_path)
    assert done.code == 0 and done.output.count("Final validation accuracy") == 1, done.output
    assert "2 ranks on cpu, 1 thread a rank" in done.output, done.output
    assert_none_inside(tmp_path)
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("horovod", "modules", "own-script")
def test_the_resnet9_script_under_mpiexec() -> None:
    """A script of Horovod's prints what its module prints."""
    words = ["--data", "digits", "--width", "4", "--epochs", "2", "--log-every", "5"]
    done = run([*_mpiexec(), str(ROOT / "examples/modules/horovod_resnet9.py"), *words], clean_env(), 180)
    assert done.code == 0 and "12 batches of 128, 64 on this rank" in done.output, done.output
    lines = re.findall(r"^acc: (\d\.\d+); avg_loss: (\d+\.\d+)$", done.output, re.M)
    assert len(lines) == 6 and float(lines[-1][0]) > 0.6 and float(lines[-1][1]) < float(lines[0][1]), done.output
    assert len(re.findall(r"^Training Time: \d+\.\d+ s$", done.output, re.M)) == 1


MODULE = """
import warnings
warnings.simplefilter("error")
from needle_shim import MPI, ResNet9, ddp, ndl
import numpy as np

assert (MPI is not None) == {with_mpi4py}
np.random.seed(0)
rank, device = ddp.init()
dataset = ndl.data.CIFAR10Dataset("data/cifar-10-batches-py", train=True)
batches, per_rank = ddp.partition_dataset(dataset, 128, device=device, dtype="float32")
model = ResNet9(device=device, dtype="float32")
ddp.broadcast_parameters(model)
model.train()
optimizer = ndl.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.001)
optimizer = ddp.DistributedOptimizer(optimizer)
loss_function = ndl.nn.SoftmaxLoss()
for epoch in range(2):
    for batch in batches:
        optimizer.reset_grad()
        x, y = batch
        out = model(x)
        right = np.sum(np.argmax(out.numpy(), axis=1) == y.numpy())
        loss = loss_function(out, y)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"acc: {{right / y.shape[0]}} of {{y.shape[0]}} of {{len(dataset)}}, loss: {{loss.data.numpy()}}")
"""


@pytest.mark.promise("horovod", "modules")
@pytest.mark.parametrize("with_mpi4py", [False, True])
def test_the_first_modules_script_runs_but_for_its_imports(with_mpi4py: bool, tmp_path: Path) -> None:
    if with_mpi4py and find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    if not with_mpi4py:
        (tmp_path / "mpi4py.py").write_text("raise ImportError\n")
    folder = tmp_path / "data/cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([label]) + os.urandom(3072) for label in range(2)))
    (tmp_path / "train_resnet.py").write_text(MODULE.format(with_mpi4py=with_mpi4py))
    env = clean_env(PYTHONPATH=f"{ROOT}:{ROOT / 'examples/modules'}", OMP_NUM_THREADS="1")
    done = run([*_mpiexec(), "train_resnet.py"], env, 180, cwd=tmp_path)
    lines = re.findall(r"^acc: (\S+) of 5 of 10, loss: (\S+)$", done.output, re.M)
    assert done.code == 0 and len(lines) == 2 and float(lines[1][1]) < 100, done.output
