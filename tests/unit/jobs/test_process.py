"""A program in the foreground whose signals go another way."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lockstep.jobs import process
from lockstep.training.contract import UserError


def test_the_second_signal_that_does_not_get_through_ends_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    """Else nothing would, where the way to the command is broken."""
    passed: list[int] = []

    def interrupt(number: int) -> None:
        passed.append(number)
        if len(passed) == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        raise UserError("it was not passed on")

    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with open(os.devnull) as nothing:
        code = process.run(["sleep", "60"], process.Streams(nothing.fileno(), 1, 2), interrupt=interrupt)
    assert (code, passed) == (128 + signal.SIGTERM, [signal.SIGINT, signal.SIGTERM])
    assert capfd.readouterr().err.count("it was not passed on") == 2
