"""The environment of another process, as `lockstep exec` reads it to find a rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.wire import progress
from lockstep.wire.progress import variables_of

AGAIN = "import os, sys; os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', os.environ['AGAIN']])"
"""A program that executes itself for ever. Of 250 looks at such a process one met it without an environment."""


def test_a_process_that_is_beginning_its_program_has_its_environment() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", AGAIN], env={"AGAIN": AGAIN, "RANK": "1"})
    try:
        assert [variables_of(process.pid).get("RANK") for _ in range(5000)] == ["1"] * 5000
    finally:
        process.kill()
        process.wait()
    assert variables_of(process.pid) == {}


def test_a_process_without_an_environment_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for one."""
    monkeypatch.setattr(progress, "EXEC_SECONDS", 3600)
    process = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        assert variables_of(process.pid) == {}
    finally:
        process.kill()
        process.wait()
