"""NaN, a rank that stops, a rank that fails: the job ends and names the rank to look at."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from tests.conftest import Undisturbed
from tests.events import events, status_of, summary_of
from tests.runs import FINAL, Job, assert_same, tensors


def _finite(job: Job, step: int) -> bool:
    state = tensors(job.run_dir, step)
    return all(bool(torch.isfinite(tensor).all()) for name, tensor in state.items() if "rng" not in name)


@pytest.mark.promise("not-finite")
def test_a_nan_stops_all_ranks_before_any_weight_is_changed(job: Job) -> None:
    result = job.go(LOCKSTEP_TEST_FATE="1:7:NAN")
    assert result.code == 1 and "step 7: rank 1: gradient of head.bias" in result.output, result.output
    assert job.steps()[0] == 6


@pytest.mark.promise("not-finite")
def test_a_step_that_is_left_out_leaves_no_trace(job: Job) -> None:
    """Its forward pass has been through batch norm and the loss: neither may keep a NaN, of no micro-batch."""
    job.words += ["nonfinite=skip", "micro_batch_size=6"]
    result = job.go(LOCKSTEP_TEST_FATE="1:5:NANINPUT")
    assert result.code == 0 and _finite(job, FINAL), result.output
    assert len(events(job.run_dir, "nonfinite")) == 1
    assert all(math.isfinite(event["train_loss"]) for event in events(job.run_dir, "epoch"))


def test_an_epoch_without_a_finite_step_has_no_loss(job: Job) -> None:
    """From step 9 on every step is left out, more than `nonfinite_limit` in a row the first time. Epochs, scores and the summary have no
    loss; a loss of 0.0 would look perfect."""
    job.words += ["nonfinite=skip", "log.every=4", "log.score_every=4", "nonfinite_limit=3"]
    first = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert first.code == 1 and "nonfinite_limit" in first.output and "step 12: rank 1" in first.output, first.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [9, 10, 11, 12]
    shutil.rmtree(job.run_dir)
    job.words.pop()
    result = job.go(LOCKSTEP_TEST_FATE="1:9:NAN")
    assert result.code == 0 and job.steps()[0] == FINAL, result.output
    assert [event["step"] for event in events(job.run_dir, "nonfinite")] == [*range(9, 25)]
    losses = [event["train_loss"] for event in events(job.run_dir, "epoch")]
    assert losses[0] > 0 and losses[1:] == [None, None]
    scores = {event["step"]: event["train_loss"] for event in events(job.run_dir, "score")}
    assert all(scores[step] > 0 for step in (1, 5)) and [scores[step] for step in (9, 13, 17, 21)] == [None] * 4
    assert summary_of(job.run_dir)["train_loss"] is None


def test_a_weight_that_becomes_nan_is_in_no_checkpoint(job: Job, undisturbed: Undisturbed) -> None:
    """A weight of rank 1 becomes NaN. No checkpoint holds it, and the newest one resumes to the undisturbed weights."""
    result = job.go(LOCKSTEP_TEST_FATE="1:9:NANWEIGHT")
    assert result.code == 1 and _finite(job, job.steps()[0]), result.output
    for line in (job.run_dir / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("named-rank")
def test_a_stopped_rank_is_named(job: Job) -> None:
    """A stopped process answers no signal. The others wait for it in a collective, up to `collective_timeout`."""
    job.words.append("collective_timeout=5")
    result = job.go(grace=2, LOCKSTEP_TEST_FATE="1:9:STOP")
    assert result.code == 1 and "rank 1 did not arrive" in result.output, result.output
    status = status_of(job.run_dir)
    assert status["code"] == 1 and "rank 1" in status["reason"] and job.steps()[0] >= 6
