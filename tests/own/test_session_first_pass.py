"""A rank that goes past DDP before DDP has seen any pass: it is named, and nothing of the ranks, which differ, is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.own.job import script

CODE = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, who, *words = sys.argv[1:]
with Session(run_dir, "checkpoint.every_steps=1", *words, config={"name": "first"}) as run:
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    model = run.replicate(net)
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    for epoch in run.epochs(1):
        for x, y in run.batches(data, 8):
            run.step(F.cross_entropy((net if run.rank == int(who) else model)(x), y))
print("THE END")
"""


@pytest.mark.parametrize("who", ["0", "1"])
def test_a_rank_that_never_calls_what_replicate_returned_is_told_so(tmp_path: Path, who: str) -> None:
    done = script(2, CODE, tmp_path / "run", who, "sync.name=ddp")
    assert done.code == 2 and "sync.name=ddp has not summed the gradient of" in done.output, done.output
    assert "call that network" in done.output and "THE END" not in done.output, done.output
    assert not list((tmp_path / "run").glob("checkpoints/*"))
