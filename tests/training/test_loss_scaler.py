"""float16: gradients that would vanish do not, an overflow costs no sample, and the scale goes through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lockstep.training.checkpoint import store
from lockstep.training.models.arithmetic import autocast
from lockstep.training.optim.loss_scaler import GROWTH_STEPS, HIGHEST, INITIAL, LOWEST, LossScaler, is_state
from tests.nets import SmallConv
from tests.runs import FINAL, LOSSY_START, Job, tensors


def _gradients(precision: str, factor: float = 1.0) -> list[torch.Tensor]:
    """Of a mean over many samples, most of them learnt: what makes gradients small."""
    torch.manual_seed(0)
    model, x = SmallConv(), torch.randn(16, 3, 8, 8)
    with autocast(precision, torch.device("cpu")):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), torch.arange(16) % 10, reduction="sum") / 1e5
    (loss * factor).backward()
    return [p.grad / factor for p in model.parameters() if p.grad is not None]


def test_a_convolutions_gradients_survive_float16_with_a_scale() -> None:
    exact = _gradients("float32")
    plain, scaled = _gradients("float16"), _gradients("float16", 1024.0)
    filters = [index for index, grad in enumerate(exact) if grad.ndim == 4]
    for index in filters:
        off = [float((found[index] - exact[index]).norm() / exact[index].norm()) for found in (plain, scaled)]
        assert off[1] < 0.02 < off[0]


def test_the_factor_is_halved_at_an_overflow_and_doubled_after_many_steps_without() -> None:
    scaler = LossScaler(torch.device("cpu"))
    assert scaler.halve() and scaler.value == INITIAL / 2 == 1 / float(scaler.inverse)
    assert [scaler.grow_if_due() for _ in range(GROWTH_STEPS)] == [False] * (GROWTH_STEPS - 1) + [True]
    assert scaler.value == INITIAL == float(scaler.factor)
    scaler.set(LOWEST)
    assert not scaler.halve() and scaler.value == LOWEST
    scaler.set(HIGHEST)
    assert not any(scaler.grow_if_due() for _ in range(2 * GROWTH_STEPS)) and scaler.value == HIGHEST


def test_a_state_from_a_file_is_looked_at() -> None:
    scaler = LossScaler(torch.device("cpu"))
    assert is_state(scaler.state_dict())
    for wrong in (None, {}, {"factor": 3.0, "steps": 0}, {"factor": 1024.0, "steps": -1}, {"factor": 2.0**60, "steps": 0},
                  {"factor": float("nan"), "steps": 0}, {"factor": 1024.0, "steps": 0, "more": 1}):  # fmt: skip
        assert not is_state(wrong), wrong


@pytest.mark.parametrize("strategy", ["flat", "zero1", "fsdp", "powersgd"])
def test_a_killed_float16_run_goes_on_to_the_same_bits(data_root: Path, tmp_path: Path, strategy: str) -> None:
    changes = {
        "precision": "float16",
        "sync.name": strategy,
        "loss.reduction": "sum",
        "lr": 0.002,
        **LOSSY_START.get(strategy, {}),
    }
    jobs = [Job(tmp_path / name, data_root, 2, **changes) for name in ("whole", "killed")]
    assert jobs[0].go().code == 0
    assert jobs[1].go(LOCKSTEP_TEST_FATE="1:13:KILL").code != 0
    resumed = jobs[1].go()
    assert resumed.code == 0 and "Resuming at step" in resumed.output
    states = [store.load(job.run_dir / "checkpoints" / f"step-{FINAL:08d}")["shared"]["loss_scale"] for job in jobs]
    assert states[0] == states[1] and states[0]["steps"] > 0  # of the steps since an overflow
    whole, found = (tensors(job.run_dir) for job in jobs)
    assert whole.keys() == found.keys() and all(torch.equal(whole[name], found[name]) for name in whole)
    assert all(bool(torch.isfinite(t).all()) for t in found.values() if t.is_floating_point())


def test_float16_trains_every_sample_and_close_to_float32(data_root: Path, tmp_path: Path) -> None:
    losses = []
    for precision in ("float32", "float16"):
        job = Job(tmp_path / precision, data_root, 2, **{"precision": precision, "model": "tests.nets:SmallConv"})
        assert job.go().code == 0
        last = store.load(job.run_dir / "checkpoints" / f"step-{FINAL:08d}")["shared"]
        losses.append(last["history"]["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_a_nan_is_named_under_float16(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 2, precision="float16")
    done = job.go(LOCKSTEP_TEST_FATE="1:7:NAN")
    assert done.code == 1 and "step 7: rank 1: gradient of head.bias is not finite; no weight" in done.output
