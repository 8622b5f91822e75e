"""A step that is given as a function may be called again: in parts, at half the scale, for a diagnosis; and a run has an end of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.own.job import assert_weights, script, shared
from tests.processes import Result

CODE = """
import sys, torch, torch.nn.functional as F
from lockstep import Session
run_dir, kind, *words = sys.argv[1:]
DATA = torch.utils.data.TensorDataset(torch.randn(240, 6, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 3)
drawn, calls, epochs = [], [], int(kind.removeprefix("steps:")) if kind.startswith("steps") else 0
class Drawn(torch.nn.Dropout):
    def forward(self, x):
        y = super().forward(x)
        if self.training:
            drawn.append(float((y == 0).float() @ torch.arange(y.shape[-1]).float() @ torch.ones(()) if y.ndim == 1 else
                         ((y == 0).float() * torch.arange(y.numel()).view(y.shape)).sum()))
        return y
with Session(run_dir, "checkpoint.every_steps=2", "checkpoint.keep=50", *words, config={"name": "function"}) as run:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8) if kind == "nan" else torch.nn.Identity()]
    net = torch.nn.Sequential(*layers, Drawn(0.5 if kind == "drops" else 0.0), torch.nn.Linear(8, 3))
    model = run.replicate(net)
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", growth_interval=5, enabled=kind == "half")
    run.keep(scaler=scaler)
    def loss(x, y):
        calls.append(run.steps)
        if kind == "nan" and run.steps == 4 and run.rank == 1:
            x = x * float("nan")
        logits = model(x)
        if kind == "half" and run.rank == 1 and run.steps in (3, 7) and calls.count(run.steps) < 3:
            logits = logits * torch.tensor(1.0, requires_grad=True)
            logits.register_hook(lambda grad: grad * float("inf"))
        return F.cross_entropy(logits, y)
    for epoch in run.epochs(steps=epochs) if epochs else run.epochs(2):
        for x, y in run.batches(DATA, 24):
            run.step(loss, x, y, scaler=scaler, clip=1.0)
            if kind == "stop" and run.steps == 13 and run.rank == 1:
                run.stop("enough")
        run.log(calls=len(calls))
    totals = run.gather(drawn)
    if run.leader and kind == "drops":
        print("DRAWN", totals[0] != totals[1], [len(t) for t in totals])
        print("FIRST", *(t[0] for t in totals))
    print(f"SCALE {scaler.get_scale()} CALLS {len(calls)}\\n", end="")
"""


def train(ranks: int, run_dir: Path, kind: str, *words: str, **variables: str) -> Result:
    return script(ranks, CODE, run_dir, kind, *words, **variables)


@pytest.mark.promise("half-precision")
@pytest.mark.parametrize("sync", ["flat", "ddp", "zero1", "fsdp"])
def test_a_step_that_overflows_is_taken_again_and_none_is_lost(tmp_path: Path, sync: str) -> None:
    """Scales are powers of two: the weights are those without a scale, of all twenty steps."""
    plain = train(2, tmp_path / "plain", "plain", f"sync.name={sync}")
    half = train(2, tmp_path / "half", "half", f"sync.name={sync}")
    assert plain.code == half.code == 0, half.output
    assert "CALLS 20" in plain.output and half.output.count("CALLS 24") == 2, half.output
    one, other = (shared(tmp_path / name)["model"] for name in ("plain", "half"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.promise("session-same")
def test_micro_batches_are_a_setting(tmp_path: Path) -> None:
    whole, parts = train(2, tmp_path / "whole", "plain"), train(2, tmp_path / "parts", "plain", "micro_batch_size=5")
    assert whole.code == parts.code == 0, parts.output
    assert "CALLS 20" in whole.output and "CALLS 60" in parts.output, "each part of twelve in three"
    assert_weights(tmp_path / "parts", shared(tmp_path / "whole")["model"], atol=1e-6)
    tensor = CODE.replace("run.step(loss, x, y, scaler=scaler, clip=1.0)", "run.step(loss(x, y))")
    refused = script(1, tensor, tmp_path / "tensor", "plain", "micro_batch_size=5")
    assert refused.code == 1 and "TypeError: micro_batch_size" in refused.output, refused.output


@pytest.mark.promise("not-finite")
@pytest.mark.parametrize("sync", ["flat", "ddp", "fsdp"])
def test_the_rank_and_the_parameter_of_a_nan_are_named(tmp_path: Path, sync: str) -> None:
    done = train(2, tmp_path / "run", "nan", f"sync.name={sync}", "nonfinite=stop")
    assert done.code == 1 and "diverged at step 5: rank 1: loss is not finite, gradient of 0.weight" in done.output, (
        done.output
    )
    assert "rank 0: " not in done.output.split("diverged at")[1].splitlines()[0]
    skipped = train(2, tmp_path / "skip", "nan", f"sync.name={sync}", "nonfinite=skip")
    assert skipped.code == 0, skipped.output
    buffers = [tensor for name, tensor in shared(tmp_path / "skip")["model"].items()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in buffers)


@pytest.mark.promise("session-resume")
def test_dropout_differs_between_the_ranks_and_is_the_same_after_a_resume(tmp_path: Path) -> None:
    calm = train(2, tmp_path / "calm", "drops")
    assert calm.code == 0 and "DRAWN True [20, 20]" in calm.output, calm.output
    first = calm.output.split("FIRST ")[1].split()[:2]
    assert first[0] != first[1]
    halves = [train(2, tmp_path / "run", "drops", "checkpoint.every_steps=2") for _ in range(1)]
    assert halves[0].code == 0
    one, other = shared(tmp_path / "calm")["model"], shared(tmp_path / "run")["model"]
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.promise("session-resume")
def test_a_run_of_so_many_steps_goes_on_with_more(tmp_path: Path) -> None:
    """Twelve steps end in the middle of an epoch of ten; a start with sixteen goes on there."""
    for steps in (12, 16, 16):
        done = train(2, tmp_path / "run", f"steps:{steps}")
        assert done.code == 0, done.output
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert status["step"] == steps and status["reason"] == "complete"
    assert train(2, tmp_path / "whole", "steps:16").code == 0
    one, other = (shared(tmp_path / name)["model"] for name in ("run", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.promise("session-resume")
def test_one_rank_ends_the_run_for_good(tmp_path: Path) -> None:
    for attempt in (1, 2):
        done = train(2, tmp_path / "run", "stop")
        status = json.loads((tmp_path / "run/status.json").read_text())
        assert done.code == 0 and status["reason"] == "stopped: enough", done.output
        assert 13 <= status["step"] <= 14 and ("It was stopped: enough" in done.output) == (attempt == 2), done.output
    left = script(2, CODE.replace('run.stop("enough")', "pass").replace("        run.log(calls", "        break\n        run.log(calls"),
                  tmp_path / "left", "stop")  # fmt: skip
    assert left.code == 0 and left.output.count("run.stop(reason) in place of `break`") == 1, left.output
    assert "left after" in json.loads((tmp_path / "left/status.json").read_text())["reason"]


@pytest.mark.promise("session-resume")
def test_a_schedule_that_no_checkpoint_has_is_warned_of(tmp_path: Path) -> None:
    """A start that resumes would train with other rates, without a word."""
    made = "    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)\n    run.keep("
    for kept, warned in (("schedule=schedule, ", 0), ("", 1)):
        code = CODE.replace("    run.keep(", made + kept)
        done = script(2, code, tmp_path / f"kept-{warned}", "plain")
        assert done.code == 0 and done.output.count("run.keep(schedule=") == warned, done.output


@pytest.mark.promise("session-resume")
def test_a_schedule_may_come_between_two_starts(tmp_path: Path) -> None:
    """It keeps numbers of its own in the optimizer's groups, which those of the checkpoint do not have."""
    made = "    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)\n    run.keep("
    steps = "scaler=scaler, clip=1.0)\n"
    later = CODE.replace("    run.keep(", made).replace(steps, f"{steps}            schedule.step()\n")
    for code, kind in ((CODE, "steps:4"), (later, "steps:6")):
        done = script(1, code, tmp_path / "run", kind)
        assert done.code == 0, done.output
    assert "Resuming at step 4" in done.output
