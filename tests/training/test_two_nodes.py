"""Two nodes whose data is on disks of their own: two processes of one rank each."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes import ROOT, Result, poll
from tests.warm.gang import Gang, running

NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCKSTEP_THREADS": "1"}
RUN = ["-m", "lockstep.training", "run", "smoke", "--run-dir"]


SOURCE = """
import time
import numpy as np

def samples(split, root):
    (root / "begun").touch()
    while root.name == "slow" and split == "train" and not (root / "go").exists():
        time.sleep(0.1)
    yield np.random.default_rng(0).integers(0, 255, (96, 8, 8, 3), np.uint8), np.arange(96) % 10
"""


class TestOneNodeStillPreparesItsData:
    def started(self, tmp_path: Path, *more: str) -> tuple[list[list[str]], dict[str, str]]:
        (tmp_path / "mine.py").write_text(SOURCE)
        words = [*RUN, str(tmp_path / "run"), "--set", "data.source=mine:samples", "data.options={}", "epochs=1",
                 "batch_size=16", "metrics.port=0", "collective_timeout=10", *more]  # fmt: skip
        for name in ("quick", "slow"):
            (tmp_path / name).mkdir()
        roots = [f"data.root={tmp_path / name}" for name in ("quick", "slow")]
        return [[*words, root] for root in roots], {**NODES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def begun(self, gang: Gang, tmp_path: Path) -> Gang:
        poll(lambda: (tmp_path / "slow/begun").exists() and list(tmp_path.glob("quick/shards/*/manifest.json")), 60)
        return gang

    def assert_told(self, done: Result, code: int, told: str) -> None:
        assert done.code == code and told in done.output and "Traceback" not in done.output, done.output

    def test_the_others_wait_as_long_as_it_works(self, tmp_path: Path) -> None:
        with running(*self.started(tmp_path)) as gang:
            self.begun(gang, tmp_path)
            with pytest.raises(AssertionError):  # no rank ends, for longer than a collective may take
                poll(lambda: any(one.poll() is not None for one in gang.processes), 13)
            (tmp_path / "slow/go").touch()
            self.assert_told(gang.wait(240), 0, "")

    def test_a_node_that_says_nothing_is_not_waited_for(self, tmp_path: Path) -> None:
        with running(*self.started(tmp_path), grace=1) as gang:
            self.begun(gang, tmp_path).processes[1].send_signal(signal.SIGSTOP)
            self.assert_told(gang.wait(240), 1, "have sent nothing for 10 s")
