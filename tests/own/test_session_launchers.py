"""The same loop under every launcher, from a shell: interpreters that start and end as they do elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.events import status_of
from tests.own.job import OwnJob
from tests.processes import LOCKSTEP, PYTHON, clean_env, free_port, run
from tests.runs import assert_same, tensors
from tests.warm.gang import running

COMMAND = [LOCKSTEP, "run", "--ranks", "2", "--", PYTHON]
pytestmark = pytest.mark.promise("session-resume")


@pytest.mark.promise("launchers", "kill-resume")
def test_torchrun_starts_a_killed_rank_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    calm = OwnJob(tmp_path / "calm", 2)
    disturbed = OwnJob(tmp_path / "run", 2, LOCKSTEP_TEST_ONCE=str(tmp_path / "once"))
    assert calm.go().code == 0
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3", "--master-port"]
    words = [PYTHON, *torchrun, str(free_port()), *disturbed.program, *disturbed.words]
    done = run(words, disturbed.env(LOCKSTEP_TEST_FATE="1:13:KILL"), 240)
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert "the script goes on after the run" in done.output, done.output
    assert_same(disturbed.run_dir, tensors(calm.run_dir))


@pytest.mark.promise("full-disk")
def test_a_disk_that_hangs_does_not_outlive_the_grace(tmp_path: Path) -> None:
    """No launcher is there to end the process. Its interpreter must not wait for the thread that writes."""
    alone = OwnJob(tmp_path / "run", 1, "batches", "preempt.grace_seconds=2", "checkpoint.every_steps=100")
    fate = {"LOCKSTEP_TEST_WRITE": "7:HANGALL", "LOCKSTEP_TEST_FATE": "0:9:TERM"}
    done = run([PYTHON, *alone.program, *alone.words], alone.env(**fate), 240)
    assert done.code == 1 and "the grace period of 2 s" in done.output, done.output


@pytest.mark.promise("signals")
def test_a_second_signal_in_the_last_moments_changes_no_code(tmp_path: Path) -> None:
    """One of two ranks gets both, from a shell. Python must not abort (134) once the run is saved."""
    disturbed = OwnJob(tmp_path / "run", 2, LOCKSTEP_TEST_FATE="1:13:TWICE")
    done = run([*COMMAND, *disturbed.program, *disturbed.words], disturbed.env(), 240)
    assert done.code == 75, done.output
    assert status_of(tmp_path / "run")["code"] == 75


def test_forked_loaders_hold_up_no_end(tmp_path: Path) -> None:
    """A loader's processes inherit the descriptor that signals come from. The end does not wait for theirs."""
    code = """
import os, signal, sys, time
from lockstep import Session
with Session(sys.argv[1]) as run:
    child = os.fork()
    if not child:
        signal.pause()
    before = time.monotonic()
print("ended", time.monotonic() - before < 60, flush=True)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""
    with running([["-c", code, str(tmp_path / "run")]], clean_env()) as forked:
        assert "ended True" in forked.wait(240).output
