"""Signals of one process, and what ranks decide together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.training.parallel.world import World
from lockstep.training.resilience.preempt import Consensus, Decision, Signals
from tests.processes import PYTHON, poll, run

pytestmark = pytest.mark.promise("signals")


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def signals(clock: list[float]) -> Iterator[Signals]:
    caught = Signals(["USR1", "TERM"], now=lambda: clock[0])
    yield caught
    caught.restore()


def test_one_signal_sets_a_flag_and_its_echo_is_the_same_one(signals: Signals, clock: list[float]) -> None:
    assert signals.received is None
    os.kill(os.getpid(), signal.SIGUSR1)
    poll(lambda: signals.received, 10, "the signal")
    clock[0] = 1.9
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == "SIGUSR1"


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, sys, threading\nfrom lockstep.training.resilience.preempt import Signals\nclock = [0.0]\n"
        "s = Signals(['TERM'], now=lambda: clock[0])\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "while s.received is None: pass\n"
        "clock[0] = 2.1\nos.kill(os.getpid(), signal.SIGTERM)\nthreading.Event().wait(30)\nprint('survived')"
    )
    done = run([PYTHON, "-c", code], timeout=60)
    assert done.code == 128 + signal.SIGTERM and "survived" not in done.output


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_not_asked_to_save(signals: Signals) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM and signals.received is None


def test_one_rank_decides_at_once(tmp_path: Path, signals: Signals) -> None:
    now = [0.0]
    consensus = Consensus(World(), signals, tmp_path / "STOP", now=lambda: now[0])
    assert consensus.poll() == Decision() and consensus.poll(save_due=True) == Decision(save=True)
    (tmp_path / "STOP").touch()
    assert not consensus.poll().stop  # looked less than a second ago
    now[0] = 1.0
    assert consensus.poll().stop and consensus.reason == "STOP file"
