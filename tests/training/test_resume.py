"""Killed after any step and run again: the same weights to the bit, and no sample twice or never."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests import product
from tests.conftest import Undisturbed
from tests.events import events, status_of, summary_of
from tests.runs import FINAL, LOSSY_START, Job, assert_same, tensors

KILLS = ((0, 8), (-1, 9))
"""Rank and forward pass of each kill. A resumed start begins at the newest even step before: in mid-epoch, one step after an
epoch's end."""
TABLE = [("ddp", 2), ("zero1", 3), (product.FSDP, 3), (product.POWERSGD, 3)]
"""One strategy of each engine, and each strategy with a memory. tests/faults kills `flat` at random."""


@pytest.mark.promise("kill-resume")
@pytest.mark.parametrize(("strategy", "ranks"), TABLE)
def test_killed_and_run_again(
    undisturbed: Undisturbed, tmp_path: Path, data_root: Path, strategy: str, ranks: int
) -> None:
    """The model has batch statistics, dropout, an average and, for powersgd, error feedback by rank."""
    job = Job(tmp_path / "run", data_root, ranks, **{"sync.name": strategy, **LOSSY_START.get(strategy, {})})
    for rank, passes in KILLS:
        number = passes + (strategy == "ddp")  # its warm-up pass counts, too
        died = job.go(LOCKSTEP_TEST_FATE=f"{rank % ranks}:{number}:KILL")
        assert died.code == 1 and "Traceback" not in died.output, died.output
        assert "did not arrive" in died.output or "lost rank 0" in died.output, died.output
        assert status_of(job.run_dir)["code"] in (None, 1)
    done = job.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert status_of(job.run_dir)["failures"] == len(KILLS)
    assert_same(job.run_dir, undisturbed(ranks, strategy))
    summary = summary_of(job.run_dir)
    assert summary["restarts"] == len(KILLS) and summary["steps"] == FINAL
    resumed = [event["step"] for event in events(job.run_dir, "resumed")]
    assert [event["attempt"] for event in events(job.run_dir, "start")] == [1, 2, 3]
    assert resumed[0] in (2, 4, 6) and resumed == sorted(resumed) and resumed[-1] >= 10
    if strategy == product.POWERSGD:
        errors = [tensor for place, tensor in tensors(job.run_dir).items() if "/sync/errors/" in place]
        assert len(errors) == ranks and not torch.equal(errors[0], errors[1])


@pytest.mark.promise("kill-resume")
def test_any_step_of_an_epoch_can_be_the_last_one(undisturbed: Undisturbed, data_root: Path, tmp_path: Path) -> None:
    """A signal at the first and the last steps of three epochs of eight steps: saved after that step."""
    job, before = Job(tmp_path / "run", data_root, 1), 0
    for step in (1, 2, 7, 8, 9, 16, 17):
        left = job.go(LOCKSTEP_TEST_FATE=f"0:{step - before}:TERM")
        before = step
        assert left.code == 75 and job.steps()[0] == step, left.output
    assert job.go().code == 0 and status_of(job.run_dir)["failures"] == 0
    assert_same(job.run_dir, undisturbed(1))


@pytest.mark.promise("other-world-size")
@pytest.mark.parametrize("strategy", ["zero1", product.FSDP])
def test_another_world_size_resumes_with_the_same_samples(strategy: str, tmp_path: Path, data_root: Path) -> None:
    """A run is killed on 2 ranks, preempted on 3, and ended on 1. Weights, average and scores are those of the undisturbed run, up to
    the order of summation."""
    changes = {
        "model": "tests.nets:DyingPlain", "precision": "float64", "optim.name": "adam", "lr": 0.001, "micro_batch_size": 6,
    }  # fmt: skip
    job, alone = (Job(tmp_path / name, data_root, 2, **changes, **{"sync.name": strategy}) for name in ("run", "whole"))
    assert job.go(LOCKSTEP_TEST_FATE="1:12:KILL").code == 1  # a step has two passes
    job.ranks = 3
    left = job.go(LOCKSTEP_TEST_FATE="1:9:TERM")
    assert left.code == 75 and "3 ranks on cpu" in left.output and "Resuming at step" in left.output, left.output
    job.ranks, alone.ranks = 1, 1
    assert job.go().code == alone.go().code == 0
    assert summary_of(job.run_dir)["global_batch_size"] == 24
    cut, whole = (product.checkpoint(j.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"] for j in (job, alone))
    for kind in ("model", "average"):
        for name, tensor in cut[kind].items():
            torch.testing.assert_close(tensor, whole[kind][name], rtol=1e-10, atol=1e-10, msg=f"{strategy}: {name}")
    epochs = [{event["epoch"]: event["test_loss"] for event in events(j.run_dir, "epoch")} for j in (job, alone)]
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-9) and len(epochs[0]) == 3
    assert cut["history"]["train_loss"] == pytest.approx(whole["history"]["train_loss"], rel=1e-10)


def test_channels_last_resumes_bit_for_bit(data_root: Path, tmp_path: Path) -> None:
    """Neither a checkpoint nor an optimizer's state forgets the layout; fused optimizers would mix up elements."""
    changes = {"channels_last": "true", "optim.name": "adam", "lr": 0.005, "sync.name": "zero1"}
    whole, cut = (Job(tmp_path / name, data_root, 1, **changes) for name in ("whole", "cut"))
    assert whole.go().code == 0
    assert cut.go(LOCKSTEP_TEST_FATE="0:12:KILL").code == -signal.SIGKILL
    assert cut.go().code == 0
    assert_same(cut.run_dir, tensors(whole.run_dir))


@pytest.mark.promise("not-finite")
def test_powersgd_forgets_what_a_nan_has_left_in_its_memory(data_root: Path, tmp_path: Path) -> None:
    changes = {"sync.name": product.POWERSGD, **LOSSY_START[product.POWERSGD], "nonfinite": "skip"}
    job = Job(tmp_path / "run", data_root, 2, **changes)
    done = job.go(LOCKSTEP_TEST_FATE="1:8:NANINPUT")  # its warm-up pass counts too
    assert done.code == 0 and "left out step 7: " in done.output and "left out step 8" not in done.output, done.output
    assert all(bool(torch.isfinite(t).all()) for t in tensors(job.run_dir).values() if t.is_floating_point())
