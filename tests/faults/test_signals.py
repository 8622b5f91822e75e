"""Preemption: whichever rank gets the signal, all ranks leave at one boundary, saved, with exit code 75, and resume from there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.conftest import Undisturbed
from tests.events import assert_adds_up, status_of
from tests.processes import assert_none_inside, handles_term, poll, started, state_of
from tests.runs import FINAL, Job, assert_same
from tests.warm.gang import python

pytestmark = pytest.mark.promise("signals")


def _continue(job: Job, undisturbed: Undisturbed) -> None:
    result = job.go()
    assert result.code == 0, result.output
    assert_same(job.run_dir, undisturbed(job.ranks))


def _preempted(job: Job) -> dict[str, Any]:
    status = status_of(job.run_dir)
    assert status["code"] == 75 and job.steps()[0] == status["step"], status
    return status


@pytest.mark.parametrize(
    ("fate", "where"),
    [
        ("1:-2:USR2", "evaluation"), ("1:24:TERM", "the last step of all"), ("0:1:INT", "the first step"),
        ("9:TERM", "while a checkpoint is written"),
    ],
)  # fmt: skip
def test_a_signal_to_one_rank_ends_all_together(job: Job, undisturbed: Undisturbed, fate: str, where: str) -> None:
    if where == "the first step":
        job.words.append("checkpoint.every_steps=0")  # no checkpoint is there before the signal's
    once = str(job.run_dir.parent / "once")
    disk = {"LOCKSTEP_TEST_WRITE": fate, "LOCKSTEP_TEST_ONCE": once} if fate.count(":") == 1 else None
    result = job.go(**(disk or {"LOCKSTEP_TEST_FATE": fate}))
    assert result.code == 75, (where, result.output)
    reason = _preempted(job)["reason"]
    if disk is None:
        rank, _, name = fate.split(":")
        assert f"SIG{name} on rank {rank} at step" in reason, "the ranks know whose signal it was"
    _continue(job, undisturbed)


def test_a_signal_to_the_launcher_reaches_the_ranks(job: Job, undisturbed: Undisturbed) -> None:
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_FATE": "1:5:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    assert python("-c", "").code == 0  # what forks is there before a clock runs
    began = time.time()
    with job.launched("--max-restarts", "3", **fate) as gang:
        poll(held.exists, what="rank 1 in its fifth pass")
        gang.send_signal(signal.SIGTERM)
        result = gang.wait(240)
    assert result.code == 75, result.output
    assert_adds_up(job.run_dir, began)
    assert _preempted(job)["step"] < FINAL
    _continue(job, undisturbed)


@pytest.mark.parametrize("dies", [False, True], ids=["both import", "its peer has died"])
def test_a_signal_during_start_up(job: Job, undisturbed: Undisturbed, dies: bool) -> None:
    """The signal comes while both ranks import, or while rank 0 waits for a rank that dies. The job ends with 75, and resumes."""
    command = job.command("--grace", "120")  # imports take long on a busy machine
    with started(command, job.env(), job.run_dir.parent) as launcher:
        poll(lambda: job.rank_pid(0) and job.rank_pid(1), what="two ranks")
        if dies:
            os.kill(job.rank_pid(1), signal.SIGSTOP)
            poll(lambda: handles_term(job.rank_pid(0), "SigCgt"), what="torch in rank 0")
        launcher.send_signal(signal.SIGTERM)
        if dies:
            os.kill(job.rank_pid(1), signal.SIGKILL)
        output, _ = launcher.communicate(timeout=240)
    assert_none_inside(job.run_dir.parent)
    # The launcher kills a rank without the signal when the grace is over: that is 1.
    assert launcher.returncode == 75 and "Traceback" not in output and "[c10d]" not in output, output
    _continue(job, undisturbed)


def test_a_signal_in_the_last_moments_changes_nothing(job: Job) -> None:
    """Signals come to rank 0 when its work is done, and to the launcher until it has ended. The run is complete, with exit code 0."""
    with started(job.command(), job.env(LOCKSTEP_TEST_FATE="0:9:LATE")) as launcher:
        output, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0 and job.steps()[0] == FINAL, output


@pytest.mark.promise("full-disk")
def test_a_disk_that_hangs_keeps_no_rank_longer_than_its_grace(job: Job, undisturbed: Undisturbed) -> None:
    """The second save waits for the first, which never ends. Where every fsync hangs: tests/own/test_session_launchers.py."""
    job.words += ["checkpoint.every_steps=4", "preempt.grace_seconds=3"]
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_WRITE": "0:HANG", "LOCKSTEP_TEST_FATE": "1:8:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with job.launched("--grace", "600", **fate) as gang:
        poll(held.exists, what="rank 1 in its eighth pass, behind the first save")
        gang.send_signal(signal.SIGTERM)
        result = gang.wait(240)  # the ranks end by themselves
    assert result.code == 1 and "disk did not answer" in result.output and "Traceback" not in result.output, (
        result.output
    )
    _continue(job, undisturbed)


def test_a_second_signal_leaves_at_once_without_damage(job: Job, undisturbed: Undisturbed) -> None:
    """The rank is stopped, so that its first signal cannot be acted on; the second one, later, ends it."""
    with job.started(LOCKSTEP_TEST_FATE="1:9:STOP") as gang:
        poll(lambda: state_of(gang.rank_pid(1)) == "T", what="the stop of rank 1")
        first = gang.processes[0]
        first.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while first.poll() is None and time.monotonic() - began < 60:
            time.sleep(0.2)  # signals within two seconds count as one: repeat until one is later than that
            first.send_signal(signal.SIGTERM)
        assert first.poll() == 128 + signal.SIGTERM
    last = (job.run_dir / "metrics/rank-00000.prom").read_text().splitlines()
    assert [line.split()[-1] for line in last if line.startswith("training_finished{")] == ["1.0"]
    _continue(job, undisturbed)
