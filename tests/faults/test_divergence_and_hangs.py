"""NaN, a rank that stops, a rank that fails: the job ends with the name of the one to look at."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lockstep.training.observe import trackers
from tests.conftest import Undisturbed
from tests.events import events
from tests.runs import FINAL, Job, assert_same, tensors


@pytest.mark.parametrize("strategy", ["flat", "ddp"])
def test_a_nan_stops_all_ranks_before_any_weight_is_changed(job: Job, undisturbed: Undisturbed, strategy: str) -> None:
    job.words.append(f"sync.name={strategy}")
    nth = 7 if strategy == "flat" else 8  # DDP's warm-up pass counts too
    done = job.go(LOCKSTEP_TEST_FATE=f"1:{nth}:NAN")
    assert done.code == 1, done.output
    assert "diverged at step 7: rank 1: gradient of head.bias is not finite" in done.output
    assert job.steps()[0] == 6
    if strategy == "flat":
        assert job.go().code == 0
        assert_same(job.run_dir, undisturbed(2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_left_out_leaves_no_trace(job: Job, accumulate: int) -> None:
    """Its forward pass has been through batch norm and the loss: neither may keep a NaN."""
    job.words += ["nonfinite=skip", f"accumulate={accumulate}"]
    done = job.go(LOCKSTEP_TEST_FATE="1:5:NANINPUT")
    assert done.code == 0, done.output
    assert all(bool(torch.isfinite(tensor).all()) for name, tensor in tensors(job.run_dir).items() if "rng" not in name)
    left_out = events(job.run_dir, "nonfinite")
    assert len(left_out) == 1
    epochs = events(job.run_dir, "epoch")
    assert all(math.isfinite(event["train_loss"]) for event in epochs)


def test_a_rank_that_is_delayed_changes_nothing(job: Job, undisturbed: Undisturbed) -> None:
    assert job.go(LOCKSTEP_TEST_FATE="1:5:DELAY").code == 0
    assert_same(job.run_dir, undisturbed(2))


def test_a_nan_step_can_be_left_out(job: Job) -> None:
    job.words.append("nonfinite=skip")
    done = job.go(LOCKSTEP_TEST_FATE="1:23:NAN")
    assert done.code == 0, done.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [23, 24]
    assert job.steps()[0] == FINAL


def test_an_epoch_of_which_every_step_was_left_out_has_no_loss(job: Job) -> None:
    """0.0 would be told as a perfect one."""
    job.words += ["nonfinite=skip", "log.every=4"]
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert done.code == 0, done.output
    epochs = events(job.run_dir, "epoch")
    losses = [event["train_loss"] for event in epochs]
    assert losses[0] > 0 and losses[1:] == [None, None]
    assert ["train_loss" in trackers.scalars(event) for event in epochs] == [True, False, False]
    assert json.loads((job.run_dir / "summary.json").read_text())["train_loss"] is None
    table = [line.split() for line in done.output.partition("epoch    batch")[2].splitlines()]
    told = [words[4] for words in table if words[:2] in (["1", "8"], ["2", "16"], ["3", "24"])]
    assert told == [f"{losses[0]:.4f}", "–", "–"], done.output
    assert "no report.html" not in done.output and (job.run_dir / "report.html").exists()
    again = job.go()  # the checkpoint holds no loss either
    assert again.code == 0 and "The run is complete" in again.output, again.output


def test_a_step_that_was_left_out_has_no_score_of_its_loss(job: Job) -> None:
    job.words += ["nonfinite=skip", "log.score_every=4"]
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert done.code == 0, done.output
    losses = {event["step"]: event["train_loss"] for event in events(job.run_dir, "score")}
    assert all(losses[step] > 0 for step in (1, 5)) and [losses[step] for step in (9, 13, 17, 21)] == [None] * 4
    assert "step    20 | train_loss       – | test_loss " in done.output, done.output


def test_steps_that_are_left_out_in_a_row_have_a_limit(job: Job) -> None:
    job.words += ["nonfinite=skip", "nonfinite_limit=3"]
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert done.code == 1, done.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [9, 10, 11, 12]
    assert "4 steps in a row were left out (nonfinite_limit), the last one at step 12: rank 1" in done.output


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_weights_that_are_lost_become_no_checkpoint(job: Job, undisturbed: Undisturbed, nonfinite: str) -> None:
    """One rank's, too: the replicas are not looked at here. What was saved before goes on to the weights of the calm run."""
    job.words.append(f"nonfinite={nonfinite}")
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NANWEIGHT")
    assert done.code == 1, done.output
    told = "a weight is NaN or infinite after step" if nonfinite == "skip" else "the run diverged at step 9"
    assert told in done.output
    newest = tensors(job.run_dir, job.steps()[0])
    assert all(bool(torch.isfinite(tensor).all()) for name, tensor in newest.items() if "rng" not in name)
    for line in (job.run_dir / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    if nonfinite == "skip":
        return  # its steps 9 to 12 are left out in the checkpoint, as they were
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


def test_a_rank_that_stops_is_named_with_its_last_step(job: Job, undisturbed: Undisturbed) -> None:
    job.words.append("collective_timeout=5")
    done = job.go(grace=2, LOCKSTEP_TEST_FATE="1:9:STOP")
    assert done.code == 1, done.output
    assert "rank 1 did not arrive (last seen at step" in done.output
    status = json.loads((job.run_dir / "status.json").read_text())
    assert status["code"] == 1 and "rank 1 did not arrive" in status["reason"]
    assert job.steps()[0] >= 6
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


def test_a_killed_rank_is_named(job: Job) -> None:
    done = job.go(LOCKSTEP_TEST_FATE="1:9:KILL")
    assert done.code == 1 and "rank 1 did not arrive" in done.output, done.output


def test_an_error_of_ones_own_keeps_its_traceback(job: Job) -> None:
    done = job.go(LOCKSTEP_TEST_FATE="1:9:RAISE")
    assert done.code == 1 and "ArithmeticError: this rank was told to fail" in done.output, done.output


def test_deterministic_runs_give_the_same_bits(job: Job, undisturbed: Undisturbed) -> None:
    job.words.append("deterministic=true")
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))
