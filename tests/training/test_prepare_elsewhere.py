"""A node with an empty disk prepares its data while another, which has it, waits. Two nodes: two processes of one rank each."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.processes import ROOT, Result, poll
from tests.warm.gang import Gang, running

SOURCE = """
import time
import numpy as np

def samples(split, root):
    (root / "begun").touch()
    while root.name == "slow" and split == "train" and not (root / "go").exists():
        time.sleep(0.1)
    yield np.random.default_rng(0).integers(0, 255, (96, 8, 8, 3), np.uint8), np.arange(96) % 10
"""
NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCKSTEP_THREADS": "1"}


def _words(tmp_path: Path, *settings: str) -> list[list[str]]:
    (tmp_path / "mine.py").write_text(SOURCE)
    roots = [tmp_path / "quick", tmp_path / "slow"]
    for root in roots:
        root.mkdir()
    common = ["-m", "lockstep.training", "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", "data.source=mine:samples",
              "data.options={}", "epochs=1", "batch_size=16", "metrics.port=0", "collective_timeout=4", *settings]  # fmt: skip
    return [[*common, f"data.root={root}"] for root in roots]


def _ended(started: Gang, tmp_path: Path) -> Result:
    (tmp_path / "slow/go").touch()
    return started.wait(90)


def test_the_others_wait_as_long_as_it_works(tmp_path: Path) -> None:
    with running(_words(tmp_path), {**NODES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}) as started:
        poll(lambda: (tmp_path / "slow/begun").exists() and list(tmp_path.glob("quick/shards/*/manifest.json")), 60)
        with pytest.raises(AssertionError):  # nobody ends, for longer than a collective may take
            poll(lambda: any(one.poll() is not None for one in started.processes), 10)
        done = _ended(started, tmp_path)
    assert done.code == 0, done.output


def test_the_wait_is_bounded_by_its_own_setting(tmp_path: Path) -> None:
    words = _words(tmp_path, "data.prepare_timeout=6")
    with running(words, {**NODES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, grace=1) as started:
        done = started.wait(90)
    told = "error: 1 of 2 ranks still prepare the data after 6 s: check their nodes, or wait longer with data.prepare_timeout"
    assert done.code == 2 and told in done.output and "Traceback" not in done.output, done.output


def test_a_node_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with running(_words(tmp_path), {**NODES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, grace=1) as started:
        poll(lambda: (tmp_path / "slow/begun").exists(), 60)
        started.processes[1].send_signal(signal.SIGSTOP)
        done = started.wait(90)
    assert done.code == 1 and "have said nothing for 4 s: check their nodes" in done.output, done.output
    assert "Traceback" not in done.output, done.output
