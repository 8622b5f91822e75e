"""Two nodes with disks of their own: two processes of one rank each."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests import product
from tests.events import events
from tests.processes import ROOT, Result, poll
from tests.runs import settings
from tests.warm.gang import Gang, running

NODES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCKSTEP_THREADS": "1"}
RUN = ["-m", "lockstep.training", "run", "smoke", "--run-dir"]


@pytest.mark.promise("node-local")
def test_all_ranks_go_on_from_the_newest_checkpoint_that_any_node_has(data_root: Path, tmp_path: Path) -> None:
    changes = {"model": "tests.nets:SmallConv", "checkpoint.write": "node", "checkpoint.every_steps": 4}

    def trained(epochs: int) -> None:
        words = settings(data_root, epochs=epochs, **changes)
        with running([[*RUN, str(tmp_path / f"node{rank}"), *words] for rank in (0, 1)], NODES) as gang:
            done = gang.wait(240)
        assert done.code == 0, done.output

    trained(1)
    assert product.checkpoint_steps(tmp_path / "node0")[0] == 8
    shutil.rmtree(tmp_path / "node0/checkpoints/step-00000008")
    trained(2)
    assert [event["step"] for event in events(tmp_path / "node0", "resumed")] == [8]
    one, other = (
        product.checkpoint(tmp_path / f"node{rank}/checkpoints/step-00000016")["shared"]["model"] for rank in (0, 1)
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


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
            with pytest.raises(AssertionError):  # nobody ends, for longer than a collective may take
                poll(lambda: any(one.poll() is not None for one in gang.processes), 13)
            (tmp_path / "slow/go").touch()
            self.assert_told(gang.wait(240), 0, "")

    def test_a_node_that_says_nothing_is_not_waited_for(self, tmp_path: Path) -> None:
        with running(*self.started(tmp_path), grace=1) as gang:
            self.begun(gang, tmp_path).processes[1].send_signal(signal.SIGSTOP)
            self.assert_told(gang.wait(240), 1, "have said nothing for 10 s")
