"""A loop of one's own with torch's GradScaler: the same bits as without, and a NaN is not taken for an overflow."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.own.job import script, shared
from tests.processes import Result

pytestmark = pytest.mark.promise("half-precision", "session-same")

CODE = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, scaled, fate, *words = sys.argv[1:]
infinite = []
class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(8))
    def forward(self, x):
        by = self.by * 1
        if infinite:  # of one number's gradient: under zero1 and fsdp that is one rank's part
            by.register_hook(lambda grad: torch.cat([grad[:-1], grad[-1:] * float("inf")]))
        return x + by
with Session(run_dir, "checkpoint.every_steps=2", *words, config={"name": "scaler"}) as run:
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(240, 6), torch.randint(0, 3, (240,)))
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), Shift(), torch.nn.Linear(8, 3)))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", growth_interval=5, enabled=scaled == "scaled")
    run.keep(scaler=scaler)
    rank, at, what = fate.split(":")
    for epoch in run.epochs(1):
        for x, y in run.batches(data, 8):
            struck = int(rank) in (run.rank, -1) and run.steps >= int(at) and (what == "EVER" or run.steps == int(at))
            infinite[:] = [1] * (struck and what in ("INF", "EVER"))
            if struck and what == "NAN":
                x = x * float("nan")
            if struck and what == "LEAVE":
                sys.exit(0)
            run.step(F.cross_entropy(model(x), y), scaler=scaler, clip=1.0)
    print("SCALE", scaler.get_scale())
"""


def train(run_dir: Path, scaled: str, fate: str, *words: str) -> Result:
    return script(2, CODE, run_dir, scaled, fate, *words)


def assert_same(one: Path, other: Path) -> None:
    mine, theirs = shared(one)["model"], shared(other)["model"]
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("sync", ["ddp", "flat", "zero1", "fsdp"])
def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(tmp_path: Path, sync: str) -> None:
    """All factors are powers of two: the weights are those without a scaler, which leaves out the same step."""
    name = f"sync.name={sync}"
    plain = train(tmp_path / "plain", "plain", "1:7:INF", name, "nonfinite=skip")
    assert plain.code == 0, plain.output
    done = train(tmp_path / "scaled", "scaled", "1:7:INF", name)
    assert done.code == 0, done.output
    assert done.output.count("SCALE 1048576.0") == 2, done.output  # 2^16: doubled once, halved, doubled four times
    assert_same(tmp_path / "plain", tmp_path / "scaled")


def test_the_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    assert train(tmp_path / "calm", "scaled", "0:99:NEVER").code == 0
    left = train(tmp_path / "run", "scaled", "-1:13:LEAVE")
    assert left.code == 0 and "SCALE" not in left.output, left.output
    done = train(tmp_path / "run", "scaled", "0:99:NEVER")
    assert done.code == 0 and "Resuming at step 13" in done.output, done.output
    assert_same(tmp_path / "calm", tmp_path / "run")
    assert "SCALE 4194304.0" in done.output, done.output


def test_a_loss_that_is_nan_is_no_overflow(tmp_path: Path) -> None:
    stopped = train(tmp_path / "stop", "scaled", "1:7:NAN")
    assert stopped.code == 1 and "diverged at step 8: rank 1: loss" in stopped.output, stopped.output
    skipped = train(tmp_path / "skip", "scaled", "1:7:NAN", "nonfinite=skip")
    assert skipped.code == 0 and "left out step 8: rank 1: loss" in skipped.output, skipped.output
    assert all(bool(torch.isfinite(value).all()) for value in shared(tmp_path / "skip")["model"].values())


def test_an_overflow_that_no_scale_mends_ends_the_run(tmp_path: Path) -> None:
    """It was skipped to the end, and the run called complete."""
    done = train(tmp_path / "run", "scaled", "1:3:EVER")
    assert done.code == 1 and "a gradient is not finite, though every loss is" in done.output, done.output
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["code"] == 1 and 20 < status["step"] < 30, status


FUNCTION = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
DATA = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3)
with Session(sys.argv[1], "nonfinite=skip") as run:
    model = run.replicate(torch.nn.Linear(4, 3))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    run.keep(scaler=scaler)
    def loss(x, y):
        with torch.autocast("cpu", torch.float16):
            good = F.cross_entropy(model(x).float(), y)
        return good + (model.bias.sum() * 0).sqrt() if run.rank == 1 and run.steps == 2 else good  # its gradient is NaN
    for _ in run.epochs(1):
        for x, y in run.batches(DATA, 8):
            run.step(loss, x, y, scaler=scaler)
            run.print(f"step {run.steps}: scale {scaler.get_scale()}, loss {run.loss()}")
"""


def test_a_function_loses_no_step_to_an_overflow_and_no_scale_to_a_nan(tmp_path: Path) -> None:
    done = script(2, FUNCTION, tmp_path / "run")
    assert done.code == 0 and done.output.count("left out step 3: rank 1: gradient of bias is not finite") == 2, (
        done.output
    )
    scales = [float(scale) for scale in re.findall(r"step \d: scale (\S+),", done.output)]
    assert 2.0**30 > scales[0] >= scales[1] > 2.0 and scales[1] == scales[2] == scales[3], done.output
    assert [loss == "None" for loss in re.findall(r", loss (\S+)", done.output)] == [False, False, True, False], (
        done.output
    )
