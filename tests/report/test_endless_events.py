"""The report of a run directory in which somebody has filled the events with lines that are none."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests import large_run
from tests.processes import PYTHON


@pytest.mark.parametrize("line", [b"\n", b"[\n"])
def test_millions_of_lines_without_an_event_cost_seconds(tmp_path: Path, line: bytes) -> None:
    run = large_run.run_directory(tmp_path / "run", 2, 10)
    with (run / "events.jsonl").open("ab") as file:
        file.write(line * (100 << 20))
    began = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-m", "lockstep.training", "report", str(run)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert (run / "report.html").is_file()
    assert time.monotonic() - began < 45
