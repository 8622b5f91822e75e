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

LAUNCHERS = {
    "lockstep": [str(Path(PYTHON).parent / "lockstep"), "run", "--ranks", "2", "--"],
    "torchrun": [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"],
    "mpiexec": ["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
}


def job(folder: Path, **variables: str) -> OwnJob:
    return OwnJob(folder, 2, "batches", "sync.name=flat", **variables)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_killed_and_started_again_under_a_launcher(tmp_path: Path, launcher: str) -> None:
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip("Open MPI is not installed (Debian: openmpi-bin)")
    calm, disturbed = job(tmp_path / "calm"), job(tmp_path / "run")
    assert calm.go().code == 0
    words = disturbed.words if launcher == "torchrun" else [PYTHON, *disturbed.words]
    command = [*LAUNCHERS[launcher], *words]
    if launcher == "torchrun":
        command[3:3] = ["--master-port", str(free_port())]
    variables = {**disturbed.variables, "LOCKSTEP_TEST_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(ROOT)}
    once = run(command, clean_env(**variables, LOCKSTEP_TEST_FATE="1:13:KILL"), 120)
    if launcher != "torchrun":  # which has restarted it already
        assert once.code != 0, once.output
        once = run(command, clean_env(**variables), 120)
    assert once.code == 0 and "Resuming at step" in once.output, once.output
    assert_same(disturbed, calm)


def test_one_process_without_a_launcher_is_the_same_program(tmp_path: Path) -> None:
    alone = OwnJob(tmp_path / "run", 1, "batches", "sync.name=flat")
    done = run([PYTHON, *alone.words], clean_env(**alone.variables), 90)
    assert done.code == 0 and "the script goes on after the run" in done.output, done.output
    again = OwnJob(tmp_path / "forked", 1, "batches", "sync.name=flat")
    assert again.go().code == 0
    assert_same(alone, again)


def test_the_launcher_is_killed(tmp_path: Path) -> None:
    """Its ranks end with it; what is started next goes on to the same bits."""
    calm, disturbed = job(tmp_path / "calm"), job(tmp_path / "run")
    assert calm.go().code == 0
    held, variables = tmp_path / "held", {**disturbed.variables, "PYTHONPATH": str(ROOT)}
    command = [*LAUNCHERS["lockstep"], PYTHON, *disturbed.words]
    fate = {"LOCKSTEP_TEST_FATE": "0:13:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(command, clean_env(**variables, **fate)) as launcher:
        poll(held.exists, 90, "rank 0 in its thirteenth pass")
        poll((tmp_path / "run/checkpoints/step-00000010/manifest.json").exists, 60, "a checkpoint")
        launcher.kill()
        launcher.communicate(timeout=60)  # its output is open for as long as a rank lives
    done = run(command, clean_env(**variables), 120)
    assert done.code == 0 and "Resuming at step 1" in done.output, done.output
    assert_same(disturbed, calm)


@pytest.mark.parametrize("write", ["0:HANG", "7:HANGALL"], ids=["of checkpoints", "every fsync"])
def test_a_disk_that_hangs_does_not_outlive_the_grace(write: str, tmp_path: Path) -> None:
    """No launcher is there to end the process. Its interpreter must not wait for the thread that writes."""
    alone = OwnJob(tmp_path / "run", 1, "batches", "preempt.grace_seconds=2", "checkpoint.every_steps=100")
    fate = {"LOCKSTEP_TEST_WRITE": write, "LOCKSTEP_TEST_FATE": "0:9:TERM"}
    began = time.monotonic()
    done = run([PYTHON, *alone.words], clean_env(**alone.variables, **fate), 60)
    assert time.monotonic() - began < 40, done.output
    assert done.code == 1 and "the disk did not answer within the grace period of 2 s" in done.output, done.output


def test_a_terminal_that_is_closed_ends_with_75_every_time(tmp_path: Path) -> None:
    """HUP to one of two ranks from a shell. Python's own end must not abort (134) once the run is saved."""
    for number in range(3):
        run_dir = tmp_path / str(number)
        disturbed = job(run_dir, LOCKSTEP_TEST_FATE="1:13:HUP", LOCKSTEP_TEST_ONCE=str(tmp_path / f"once{number}"))
        command = [*LAUNCHERS["lockstep"], PYTHON, *disturbed.words]
        done = run(command, clean_env(**disturbed.variables), 90)
        assert done.code == 75, done.output
        assert json.loads((run_dir / "status.json").read_text())["code"] == 75


def test_a_signal_after_the_one_that_ended_the_run_leaves_its_exit_code(tmp_path: Path) -> None:
    alone = job(tmp_path / "run")
    done = run([PYTHON, *alone.words], clean_env(**alone.variables, LOCKSTEP_TEST_FATE="0:9:TWICE"), 60)
    assert done.code == 75, done


def test_forked_loaders_hold_up_no_end(tmp_path: Path) -> None:
    """A loader's processes inherit what the signals were read from; the end does not wait for theirs."""
    code = """
import os, signal, sys, time
from lockstep.training.resilience.preempt import Signals
signals = Signals(["TERM"])
child = os.fork()
if not child:
    signal.pause()
before = time.monotonic()
signals.restore()
print("restored", time.monotonic() - before < 5, flush=True)
os.kill(child, signal.SIGTERM)
print("child", os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM)
"""
    with running([["-c", code]], clean_env()) as forked:
        done = forked.wait(30)
    assert done.output.split() == ["restored", "True", "child", "True"], done.output


def test_importing_lockstep_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, lockstep; print([name for name in sys.modules if name.split('.')[0] == 'torch' or name.startswith('lockstep.')],"
        " lockstep.Session)"
    )
    done = run([sys.executable, "-c", code], clean_env(PYTHONPATH=str(ROOT)), 60)
    assert done.output.startswith("[] <class 'lockstep.training.session.Session'>"), done.output
