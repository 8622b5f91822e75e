"""Preemption: whoever sees the signal, all ranks leave at one boundary, saved, with exit code 75."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.events import events
from tests.faults.harness import Job, assert_same
from tests.processes import poll, started
from training import contract


def _continue(job: Job, undisturbed: Any) -> None:
    done = job.go(LOCKSTEP_THREADS="1")
    assert done.code == 0, done.output
    assert_same(job.run_dir, undisturbed[job.ranks])


def _preempted(job: Job) -> dict[str, Any]:
    status = json.loads((job.run_dir / "status.json").read_text())
    assert status["code"] == 75, status
    assert job.steps()[0] == status["step"]
    return status


@pytest.mark.parametrize(
    ("fate", "where"),
    [
        ("1:5:TERM", "one rank only, mid-epoch"), ("0:5:USR1", "rank 0 only"), ("1:8:USR2", "the last step of an epoch"),
        ("1:-2:TERM", "evaluation"), ("1:24:TERM", "the last step of all"), ("0:1:INT", "the first step"),
    ],
)  # fmt: skip
def test_a_signal_to_one_rank_ends_all_together(job: Job, undisturbed: Any, fate: str, where: str) -> None:
    done = job.go(LOCKSTEP_TEST_FATE=fate, LOCKSTEP_THREADS="1")
    assert done.code == 75, (where, done.output)
    _preempted(job)
    assert "run the same command again to go on" in done.output
    _continue(job, undisturbed)


def test_a_signal_while_a_checkpoint_is_written(job: Job, undisturbed: Any) -> None:
    done = job.go(
        LOCKSTEP_TEST_WRITE="9:TERM", LOCKSTEP_TEST_ONCE=str(job.run_dir.parent / "once"), LOCKSTEP_THREADS="1"
    )
    assert done.code == 75, done.output
    _preempted(job)
    _continue(job, undisturbed)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_the_launcher_reaches_the_ranks(job: Job, undisturbed: Any, name: str) -> None:
    with started(job.command("--max-restarts", "3"), job.env(LOCKSTEP_THREADS="1")) as launcher:
        poll(lambda: events(job.run_dir, "checkpoint_written"), what="a checkpoint")
        launcher.send_signal(signal.Signals[name])
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode in (0, 75), output
    job.assert_gone()
    if launcher.returncode == 75:
        _preempted(job)
        _continue(job, undisturbed)


def test_a_signal_during_start_up(job: Job, undisturbed: Any) -> None:
    """As soon as the launcher has caught its signals: the ranks are still importing."""
    with started(job.command(), job.env(LOCKSTEP_THREADS="1")) as launcher:
        poll(lambda: job.rank_pid(0) and job.rank_pid(1), what="two ranks")
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    job.assert_gone()
    assert launcher.returncode == 75, output
    assert "Traceback" not in output
    _continue(job, undisturbed)


def test_a_stop_file(job: Job, undisturbed: Any) -> None:
    job.run_dir.mkdir()
    (job.run_dir / "STOP").touch()
    done = job.go(LOCKSTEP_THREADS="1")
    assert done.code == 75 and "STOP file" in done.output, done.output
    assert _preempted(job)["step"] <= 2
    assert not (job.run_dir / "STOP").exists()  # obeyed once
    _continue(job, undisturbed)


def test_without_a_checkpoint_on_signal_the_last_regular_one_is_the_last(job: Job, undisturbed: Any) -> None:
    job.words.append("checkpoint.on_signal=false")
    done = job.go(LOCKSTEP_TEST_FATE="1:6:TERM", LOCKSTEP_THREADS="1")
    assert done.code == 75 and job.steps()[0] % 2 == 0
    _continue(job, undisturbed)


def test_a_second_signal_leaves_at_once_without_damage(job: Job, undisturbed: Any) -> None:
    """The rank is stopped, so that its first signal cannot be acted on; the second one, later, ends it."""
    with started(job.command(), job.env(LOCKSTEP_THREADS="1", LOCKSTEP_TEST_FATE="1:9:STOP")):
        poll(lambda: (pid := job.rank_pid(1)) and _stopped(pid), what="the stop of rank 1")
        first = job.rank_pid(0)
        assert first is not None
        os.kill(first, signal.SIGTERM)
        began = time.monotonic()
        while _alive(first) and time.monotonic() - began < 30:
            time.sleep(0.2)  # signals within two seconds count as one: repeat until one is later than that
            if _alive(first):
                os.kill(first, signal.SIGTERM)
        assert not _alive(first)
    last = contract.textfile(job.run_dir, 0).read_text().splitlines()
    assert [line.split()[-1] for line in last if line.startswith("training_exit_code{")] == ["143.0"]
    assert not contract.endpoint_file(job.run_dir, 0).exists()
    for pid in job.pids():
        os.kill(pid, signal.SIGKILL)
    job.assert_gone()
    assert job.steps()
    _continue(job, undisturbed)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
