"""The same loop under every launcher, from a shell: interpreters that start and end as they do elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.own.job import OwnJob, assert_same
from tests.processes import PYTHON, ROOT, clean_env, free_port, poll, run, started
from tests.warm.gang import running

LOCKSTEP = [str(Path(PYTHON).parent / "lockstep"), "run", "--ranks", "2", "--", PYTHON]
LAUNCHERS = {
    "one process": ([PYTHON], 1),
    "torchrun": ([PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3", "--master-port"], 2),
    "mpiexec": (["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2", PYTHON], 2),
}  # fmt: skip
pytestmark = pytest.mark.promise("session-resume")


def job(folder: Path, ranks: int = 2, **variables: str) -> OwnJob:
    return OwnJob(folder, ranks, "batches", "sync.name=flat", **variables)


@pytest.mark.promise("launchers")
@pytest.mark.parametrize("name", LAUNCHERS)
def test_killed_and_started_again_under_a_launcher(tmp_path: Path, name: str) -> None:
    """Forked, undisturbed ranks are what it is compared with: also what one process is without any launcher."""
    launcher, ranks = LAUNCHERS[name]
    if shutil.which(launcher[0]) is None:
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    calm, disturbed = job(tmp_path / "calm", ranks), job(tmp_path / "run", ranks)
    assert calm.go().code == 0
    command = [*launcher, *([str(free_port())] if name == "torchrun" else []), *disturbed.words]
    variables = {**disturbed.variables, "LOCKSTEP_TEST_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(ROOT)}
    once = run(command, clean_env(**variables, LOCKSTEP_TEST_FATE=f"{ranks - 1}:13:KILL"), 120)
    if name != "torchrun":  # which has restarted it already
        assert once.code != 0, once.output
        once = run(command, clean_env(**variables), 120)
    assert once.code == 0 and "Resuming at step" in once.output, once.output
    assert "the script goes on after the run" in once.output, once.output
    assert_same(disturbed, calm)


@pytest.mark.promise("restarts")
def test_the_launcher_is_killed(tmp_path: Path) -> None:
    """Its ranks end with it; what is started next goes on to the same bits."""
    calm, disturbed = job(tmp_path / "calm"), job(tmp_path / "run")
    assert calm.go().code == 0
    held, variables = tmp_path / "held", {**disturbed.variables, "PYTHONPATH": str(ROOT)}
    command = [*LOCKSTEP, *disturbed.words]
    fate = {"LOCKSTEP_TEST_FATE": "0:13:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(command, clean_env(**variables, **fate)) as launcher:
        poll(held.exists, 90, "rank 0 in its thirteenth pass")
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        launcher.kill()
        launcher.communicate(timeout=60)  # its output is open for as long as a rank lives
    done = run(command, clean_env(**variables), 120)
    assert done.code == 0 and "Resuming at step 1" in done.output, done.output
    assert_same(disturbed, calm)


@pytest.mark.promise("full-disk")
@pytest.mark.parametrize("write", ["0:HANG", "7:HANGALL"], ids=["of checkpoints", "every fsync"])
def test_a_disk_that_hangs_does_not_outlive_the_grace(write: str, tmp_path: Path) -> None:
    """No launcher is there to end the process. Its interpreter must not wait for the thread that writes."""
    alone = OwnJob(tmp_path / "run", 1, "batches", "preempt.grace_seconds=2", "checkpoint.every_steps=100")
    fate = {"LOCKSTEP_TEST_WRITE": write, "LOCKSTEP_TEST_FATE": "0:9:TERM"}
    began = time.monotonic()
    done = run([PYTHON, *alone.words], clean_env(**alone.variables, **fate), 60)
    assert time.monotonic() - began < 40, done.output
    assert done.code == 1 and "the grace period of 2 s" in done.output, done.output


@pytest.mark.promise("signals")
def test_a_terminal_that_is_closed_ends_with_75_every_time(tmp_path: Path) -> None:
    """HUP to one of two ranks from a shell. Python's own end must not abort (134) once the run is saved; nor does a second
    signal in the last moments of one process change its code."""
    for number in range(3):
        run_dir = tmp_path / str(number)
        disturbed = job(run_dir, LOCKSTEP_TEST_FATE="1:13:HUP", LOCKSTEP_TEST_ONCE=str(tmp_path / f"once{number}"))
        done = run([*LOCKSTEP, *disturbed.words], clean_env(**disturbed.variables), 90)
        assert done.code == 75, done.output
        assert json.loads((run_dir / "status.json").read_text())["code"] == 75
    alone = job(tmp_path / "alone", 1)
    assert run([PYTHON, *alone.words], clean_env(**alone.variables, LOCKSTEP_TEST_FATE="0:9:TWICE"), 60).code == 75


def test_forked_loaders_hold_up_no_end(tmp_path: Path) -> None:
    """A loader's processes inherit what the signals were read from; the end does not wait for theirs."""
    code = """
import os, signal, sys, time
from lockstep import Session
with Session(sys.argv[1]) as run:
    child = os.fork()
    if not child:
        signal.pause()
    before = time.monotonic()
print("ended", time.monotonic() - before < 20, flush=True)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
    with running([["-c", code, str(tmp_path / "run")]], clean_env()) as forked:
        assert "ended True" in forked.wait(60).output


def test_importing_lockstep_loads_nothing(tmp_path: Path) -> None:
    names = "[name for name in sys.modules if name.split('.')[0] == 'torch' or name.startswith('lockstep.')]"
    code = f"import sys, lockstep; print({names}, lockstep.Session)"
    done = run([sys.executable, "-c", code], clean_env(PYTHONPATH=str(ROOT)), 60)
    assert done.output.startswith("[] <class 'lockstep.training.session.Session'>"), done.output
