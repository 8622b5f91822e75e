"""Signals of one process, and what ranks decide together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from lockstep.training.resilience.preempt import Signals
from tests.processes import poll

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
    poll(lambda: signals.received, what="the signal")
    clock[0] = 1.9
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == "SIGUSR1"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_not_asked_to_save(signals: Signals) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM and signals.received is None
