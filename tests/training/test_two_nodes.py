"""Two nodes whose data is on separate disks: two processes of one rank each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT, poll
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


@contextlib.contextmanager
def one_still_prepares(tmp_path: Path) -> Iterator[Gang]:
    """Both nodes have begun, and one has its data already."""
    (tmp_path / "mine.py").write_text(SOURCE)
    words = [*RUN, str(tmp_path / "run"), "--set", "data.source=mine:samples", "data.options={}", "epochs=1",
             "batch_size=16", "collective_timeout=10"]  # fmt: skip
    for name in ("quick", "slow"):
        (tmp_path / name).mkdir()
    each = [[*words, f"data.root={tmp_path / name}"] for name in ("quick", "slow")]
    with running(each, {**NODES, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, grace=1) as gang:
        poll(lambda: (tmp_path / "slow/begun").exists() and list(tmp_path.glob("quick/shards/*/manifest.json")), 60)
        yield gang


def test_the_others_wait_as_long_as_a_node_prepares_its_data(tmp_path: Path) -> None:
    with one_still_prepares(tmp_path) as gang:
        with pytest.raises(AssertionError):  # no rank ends, for longer than a collective may take
            poll(lambda: any(one.poll() is not None for one in gang.processes), 13)
        (tmp_path / "slow/go").touch()
        done = gang.wait(240)
    assert done.code == 0 and "Traceback" not in done.output, done.output
