"""Under a real mpiexec (Open MPI): Horovod's interface, a script of a user's own, and the package's own command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, Result, clean_env, require, run
from tests.warm.gang import python

EXAMPLES = ROOT / "examples"


def _missing() -> str | None:
    if not shutil.which("mpiexec"):
        return "there is no mpiexec: install Open MPI (Debian: openmpi-bin)"
    told = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, timeout=60).stdout
    return None if "Open MPI" in told or "OpenRTE" in told else "mpiexec is not Open MPI's"


@pytest.fixture(scope="module", autouse=True)
def _open_mpi() -> None:
    need_open_mpi()


def need_open_mpi() -> None:
    reason = _missing()
    require(reason is None, str(reason))


def mpiexec_command(ranks: int) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # Open MPI binds each rank to a core of its own, and mistakes a container's share for the whole machine.
    return ["mpiexec", *root, "--oversubscribe", "--bind-to", "none", "-np", str(ranks), PYTHON]


def _mpiexec(ranks: int, *words: str, timeout: float = 120) -> Result:
    return run([*mpiexec_command(ranks), *words], clean_env(), timeout)


SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import lockstep.training.sync.teaching.horovod as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for step in range(20):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
    optimizer.step()
loss = hvd.allreduce(F.cross_entropy(model(x), x[:, :3].argmax(1)).detach(), name="loss")
weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
every = hvd.allgather(weights[None])
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()}: same {bool((every == every[0]).all())}, loss {loss:.4f}\\n")
"""


@pytest.mark.promise("horovod")
def test_a_horovod_script_under_mpiexec(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = _mpiexec(3, str(script))
    assert done.code == 0, done.output
    found = sorted(re.findall(r"rank (\d) of (\d), local (\d): same (\w+), loss (\d\.\d+)", done.output))
    assert [each[:4] for each in found] == [(str(rank), "3", str(rank), "True") for rank in range(3)]
    assert len({loss for *_, loss in found}) == 1 and float(found[0][-1]) < 0.9


@pytest.mark.promise("horovod")
def test_the_resnet9_script_under_mpiexec() -> None:
    """It prints what its module prints."""
    words = ["--data", "digits", "--width", "4", "--epochs", "2", "--log-every", "5"]
    done = _mpiexec(2, str(EXAMPLES / "modules/horovod_resnet9.py"), *words, timeout=180)
    assert done.code == 0 and "12 batches of 128, 64 on this rank" in done.output, done.output
    found = re.findall(r"^acc: (\d\.\d+); avg_loss: (\d+\.\d+)$", done.output, re.M)
    assert len(found) == 6 and float(found[-1][0]) > 0.6 and float(found[-1][1]) < float(found[0][1]), done.output
    assert len(re.findall(r"^Training Time: \d+\.\d+ s$", done.output, re.M)) == 1


@pytest.mark.promise("modules")
def test_the_modules_programs_under_mpiexec() -> None:
    done = _mpiexec(2, str(EXAMPLES / "modules/collectives.py"), "--sizes", "9", "5", "4")
    assert done.code == 0 and "both are the product of one process" in done.output, done.output
    done = _mpiexec(2, str(EXAMPLES / "modules/toy.py"))
    assert done.code == 0 and done.output.count("differs from one process by at most") == 3, done.output


@pytest.mark.promise("own-script")
def test_any_strategy_under_mpiexec_gives_what_one_process_gives() -> None:
    plain = python(str(EXAMPLES / "plain.py"))
    done = _mpiexec(3, str(EXAMPLES / "parallel.py"), "hooks")
    losses = [[float(loss) for loss in re.findall(r"loss (\d\.\d+)", each.output)] for each in (plain, done)]
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], abs=1e-3), done.output


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    failing = SCRIPT.replace(
        "    x = torch.randn(16, 8)\n", "    x = torch.randn(16, 8)\n    assert hvd.rank() or step < 3\n"
    )
    script.write_text(failing)
    done = _mpiexec(2, str(script), timeout=300)  # less than the collectives' own timeout
    assert done.code != 0 and "AssertionError" in done.output and "same True" not in done.output
