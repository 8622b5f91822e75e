"""Preemption: whoever sees the signal, all ranks leave at one boundary, saved, with exit code 75."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.training import contract
from tests.conftest import Undisturbed
from tests.processes import PYTHON, ROOT, clean_env, poll, run, started
from tests.runs import FINAL, Job, assert_same


def _continue(job: Job, undisturbed: Undisturbed) -> None:
    done = job.go()
    assert done.code == 0, done.output
    assert_same(job.run_dir, undisturbed(job.ranks))


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
        ("1:6:HUP", "a terminal that is closed"),
    ],
)  # fmt: skip
def test_a_signal_to_one_rank_ends_all_together(job: Job, undisturbed: Undisturbed, fate: str, where: str) -> None:
    done = job.go(LOCKSTEP_TEST_FATE=fate)
    assert done.code == 75, (where, done.output)
    rank, _, name = fate.split(":")
    assert f"ended early by SIG{name} on rank {rank} at step" in _preempted(job)["reason"], (
        "the ranks know whose signal it was"
    )
    assert "run the same command again to resume" in done.output
    _continue(job, undisturbed)


def test_a_signal_while_a_checkpoint_is_written(job: Job, undisturbed: Undisturbed) -> None:
    done = job.go(LOCKSTEP_TEST_WRITE="9:TERM", LOCKSTEP_TEST_ONCE=str(job.run_dir.parent / "once"))
    assert done.code == 75, done.output
    _preempted(job)
    _continue(job, undisturbed)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_to_the_launcher_reaches_the_ranks(job: Job, undisturbed: Undisturbed, name: str) -> None:
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_FATE": "1:5:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(job.command("--max-restarts", "3"), job.env(**fate)) as launcher:
        poll(held.exists, what="rank 1 in its fifth pass")
        launcher.send_signal(signal.Signals[name])
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, output
    job.assert_gone()
    assert _preempted(job)["step"] < FINAL
    _continue(job, undisturbed)


def test_a_signal_during_start_up(job: Job, undisturbed: Undisturbed) -> None:
    """As soon as the launcher has caught its signals: the ranks are still importing."""
    with started(job.command(), job.env()) as launcher:
        poll(lambda: job.rank_pid(0) and job.rank_pid(1), what="two ranks")
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    job.assert_gone()
    assert launcher.returncode == 75, output
    assert "Traceback" not in output
    _continue(job, undisturbed)


def test_a_signal_in_the_last_moments_changes_nothing(job: Job) -> None:
    """To rank 0 when its work is done, and to the launcher from then on, until it is gone."""
    with started(job.command(), job.env(LOCKSTEP_TEST_FATE="0:9:LATE")) as launcher:
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and job.steps()[0] == FINAL, output


def test_a_signal_after_the_one_that_ended_the_run_leaves_its_exit_code(job: Job) -> None:
    """To a rank that has saved and is about to leave: launchers and clusters send the same one again."""
    job.ranks = 1
    done = job.go(LOCKSTEP_TEST_FATE="0:5:TWICE")
    assert done.code == 75, done
    _preempted(job)


def test_a_disk_that_hangs_keeps_a_rank_no_longer_than_its_grace(job: Job, undisturbed: Undisturbed) -> None:
    """The second save waits for the first, which never ends; the checkpoint before them is what is gone on from."""
    job.words += ["checkpoint.every_steps=4", "preempt.grace_seconds=3"]
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_WRITE": "0:HANG", "LOCKSTEP_TEST_FATE": "1:8:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(job.command(), job.env(**fate)) as launcher:
        poll(held.exists, what="rank 1 in its eighth pass, behind the first save")
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "the disk did not answer within the grace period of 3 s" in output, output
    assert time.monotonic() - began < 3 + 9, "the rest is the ranks' and the launcher's end"
    job.assert_gone()
    _continue(job, undisturbed)


def test_a_disk_that_hangs_for_everybody_keeps_no_rank_longer_than_its_grace(
    job: Job, undisturbed: Undisturbed
) -> None:
    """Every fsync from the first save on, also that of status.json."""
    job.words += ["checkpoint.every_steps=4", "preempt.grace_seconds=3"]
    held = job.run_dir.parent / "held"
    fate = {"LOCKSTEP_TEST_WRITE": "7:HANGALL", "LOCKSTEP_TEST_FATE": "1:8:HOLD", "LOCKSTEP_TEST_HELD": str(held)}
    with started(job.command(), job.env(**fate)) as launcher:
        poll(held.exists, what="rank 1 in its eighth pass, behind the first save")
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "the disk did not answer within the grace period of 3 s" in output, output
    assert "could not save" in output and "Traceback" not in output, output
    assert time.monotonic() - began < 3 + 9, "the rest is the ranks' and the launcher's end"
    job.assert_gone()
    _continue(job, undisturbed)


def test_a_signal_during_start_up_does_not_wait_for_a_peer_that_has_died(job: Job) -> None:
    """Rank 1 died while it was importing; rank 0 has come as far as waiting for it."""
    with started(job.command(), job.env()) as launcher:
        poll(lambda: job.rank_pid(0) and job.rank_pid(1), what="two ranks")
        os.kill(job.rank_pid(1), signal.SIGSTOP)
        poll(lambda: _imported(job.rank_pid(0)), what="torch in rank 0")
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        os.kill(job.rank_pid(1), signal.SIGKILL)
        output, _ = launcher.communicate(timeout=60)
    job.assert_gone()
    assert launcher.returncode == 75 and time.monotonic() - began < 15, output


def _imported(pid: int) -> bool:
    """Whether a rank catches TERM by now."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("words", "held"),
    [
        ("evaluate run", False), ("run smoke", True), ("--local-rank=0 run smoke", True),
        ("launch --ranks 1 run smoke", True), ("--debug launch -- true", True),
    ],
)  # fmt: skip
def test_only_a_run_and_its_launcher_hold_signals_back(tmp_path: Path, words: str, held: bool) -> None:
    """Another command, also about a folder called run, ends at once on a Ctrl-C. Looked at before what takes time to import."""
    program = (
        "import runpy, signal, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'lockstep.training.extras':\n"
        "            print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))\n"
        "            sys.exit(0)\n"
        "sys.meta_path.insert(0, Look())\n"
        "runpy.run_module('lockstep.training', run_name='__main__', alter_sys=True)\n"
    )
    done = run([PYTHON, "-c", program, *words.split()], clean_env(PYTHONPATH=str(ROOT)), cwd=tmp_path)
    assert done.code == 0 and done.output == f"{held}\n", done


def test_a_stop_file(job: Job, undisturbed: Undisturbed) -> None:
    job.run_dir.mkdir()
    (job.run_dir / "STOP").touch()
    done = job.go()
    assert done.code == 75 and "STOP file" in done.output, done.output
    assert _preempted(job)["step"] <= 2
    assert not (job.run_dir / "STOP").exists()  # obeyed once
    _continue(job, undisturbed)


def test_without_a_checkpoint_on_signal_the_last_regular_one_is_the_last(job: Job, undisturbed: Undisturbed) -> None:
    job.words.append("checkpoint.on_signal=false")
    done = job.go(LOCKSTEP_TEST_FATE="1:6:TERM")
    assert done.code == 75 and job.steps()[0] % 2 == 0
    _continue(job, undisturbed)


def test_a_second_signal_leaves_at_once_without_damage(job: Job, undisturbed: Undisturbed) -> None:
    """The rank is stopped, so that its first signal cannot be acted on; the second one, later, ends it."""
    with job.started(LOCKSTEP_TEST_FATE="1:9:STOP") as gang:
        poll(lambda: _stopped(gang.rank_pid(1)), what="the stop of rank 1")
        first = gang.processes[0]
        first.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while first.poll() is None and time.monotonic() - began < 30:
            time.sleep(0.2)  # signals within two seconds count as one: repeat until one is later than that
            first.send_signal(signal.SIGTERM)
        assert first.poll() == 128 + signal.SIGTERM
    last = contract.textfile(job.run_dir, 0).read_text().splitlines()
    assert [line.split()[-1] for line in last if line.startswith("training_exit_code{")] == ["143.0"]
    assert not contract.endpoint_file(job.run_dir, 0).exists()
    assert job.steps()
    _continue(job, undisturbed)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
