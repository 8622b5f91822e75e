"""The launcher's grace: what ranks have after a signal, whatever they do with it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.processes import LAUNCH, PYTHON, clean_env, poll, started

pytestmark = pytest.mark.promise("signals")

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True) or os.environ["RANK"] == "2" and sys.exit(75))
open(sys.argv[1] + os.environ["RANK"], "w").close()
time.sleep(120)
"""


def test_ranks_that_do_not_end_are_killed_when_the_grace_is_over(tmp_path: Path) -> None:
    """A program that catches the signal and works on: the platform would kill the launcher, and leave its ranks. Where one rank has ended,
    the others get no second signal."""
    command = [*LAUNCH, "--ranks", "3", "--grace", "3", "--", PYTHON, "-c", DEAF, str(tmp_path / "rank-")]
    with started(command, clean_env()) as launcher:
        poll(lambda: len(list(tmp_path.glob("rank-*"))) == 3, 240, "all ranks")
        began = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=240)
    assert time.monotonic() - began >= 3 and launcher.returncode == 75 and output.count("TERM") == 3, output
    assert "launch: the launcher killed rank 0, 1: the grace of 3 s was over\n" in output, output
    assert "by hand" not in output, output
