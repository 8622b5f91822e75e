"""NaN, a rank that stops, a rank that fails: the job ends with the name of the one to look at."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.conftest import Undisturbed
from tests.events import events
from tests.runs import FINAL, Job, assert_same, tensors


def _finite(job: Job, step: int) -> bool:
    found = tensors(job.run_dir, step)
    return all(bool(torch.isfinite(tensor).all()) for name, tensor in found.items() if "rng" not in name)


@pytest.mark.promise("not-finite")
def test_a_nan_stops_all_ranks_before_any_weight_is_changed(job: Job, undisturbed: Undisturbed) -> None:
    done = job.go(LOCKSTEP_TEST_FATE="1:7:NAN")
    assert done.code == 1 and "step 7: rank 1: gradient of head.bias" in done.output, done.output
    assert job.steps()[0] == 6
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("not-finite")
def test_a_step_that_is_left_out_leaves_no_trace(job: Job) -> None:
    """Its forward pass has been through batch norm and the loss: neither may keep a NaN, of no micro-batch."""
    job.words += ["nonfinite=skip", "micro_batch_size=6"]
    done = job.go(LOCKSTEP_TEST_FATE="1:5:NANINPUT")
    assert done.code == 0 and _finite(job, FINAL), done.output
    assert len(events(job.run_dir, "nonfinite")) == 1
    assert all(math.isfinite(event["train_loss"]) for event in events(job.run_dir, "epoch"))


def test_what_was_left_out_has_no_loss(job: Job) -> None:
    """From step 9 on every step is left out. Epochs, scores and the summary have no loss; a loss of 0.0 would look perfect."""
    job.words += ["nonfinite=skip", "log.every=4", "log.score_every=4"]
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert done.code == 0 and job.steps()[0] == FINAL, done.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [*range(9, 25)]
    losses = [event["train_loss"] for event in events(job.run_dir, "epoch")]
    assert losses[0] > 0 and losses[1:] == [None, None]
    scores = {event["step"]: event["train_loss"] for event in events(job.run_dir, "score")}
    assert all(scores[step] > 0 for step in (1, 5)) and [scores[step] for step in (9, 13, 17, 21)] == [None] * 4
    assert json.loads((job.run_dir / "summary.json").read_text())["train_loss"] is None
    again = job.go()  # the checkpoint holds no loss either
    assert again.code == 0, again.output


def test_steps_that_are_left_out_in_a_row_have_a_limit(job: Job) -> None:
    job.words += ["nonfinite=skip", "nonfinite_limit=3"]
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert done.code == 1 and "nonfinite_limit" in done.output and "step 12: rank 1" in done.output, done.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [9, 10, 11, 12]


def test_weights_that_are_lost_become_no_checkpoint(job: Job, undisturbed: Undisturbed) -> None:
    """A weight of rank 1 becomes NaN. No checkpoint holds it, and the newest one resumes to the undisturbed weights."""
    done = job.go(LOCKSTEP_TEST_FATE="1:9:NANWEIGHT")
    assert done.code == 1 and _finite(job, job.steps()[0]), done.output
    for line in (job.run_dir / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("named-rank")
def test_a_stopped_rank_is_named(job: Job, undisturbed: Undisturbed) -> None:
    job.words.append("collective_timeout=10")
    done = job.go(grace=2, LOCKSTEP_TEST_FATE="1:9:STOP")
    assert done.code == 1 and "rank 1 did not arrive" in done.output, done.output
    status = json.loads((job.run_dir / "status.json").read_text())
    assert status["code"] == 1 and "rank 1" in status["reason"] and job.steps()[0] >= 6
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))
