"""A score belongs to the weights that it was measured on: the best ones are kept, and a stop in mid-epoch forgets no score."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests import product
from tests.events import events, summary_of
from tests.own.job import script
from tests.warm.gang import python

pytestmark = pytest.mark.promise("best-checkpoint")

EPOCHS = """
SCORES = {2: 0.3, 5: 0.9, 8: 0.5}  # after a step, in the middle of an epoch of six
def evaluated(run):
    run.boundary()
    run.boundary()
    return 0.4 if run.steps == 6 else None

def train(folder, *words, **settings):
    with Session(folder, *words, handle_signals=False, **settings) as run:
        torch.manual_seed(3)
        model, optimizer = make(run)
        run.values.update(classes=["cat", "Bär"], width=64, seen=torch.ones(2))
        for epoch in run.epochs(3):
            for batch in run.iterate(list(zip(DATA.tensors[0][:24].split(4), DATA.tensors[1][:24].split(4)))):
                step(run, model, batch, samples=4)
                if run.steps in SCORES:
                    run.log(accuracy=SCORES[run.steps], wer=1 - SCORES[run.steps])
            score = evaluated(run)
            if score is not None:
                run.log(accuracy=score, test_loss=epoch)
"""
STOPPED = """
from tests import product

def start(folder, number, *words):  # its exit code
    product.stop_at_poll(number)
    try:
        train(folder, "checkpoint.keep=100", *words)
    except SystemExit as end:
        return end.code
    return 0
"""
OF_A_START = ("restarts", "preemptions", "wall_seconds", "trained_seconds", "images_per_second", "goodput")


def _reached(run_dir: Path) -> dict[str, Any]:
    summary = summary_of(run_dir)
    return {name: value for name, value in summary.items() if name not in OF_A_START}


AT = (3, 4, 8, 10)
"""Polls at which the run is asked to stop: on both sides of a score, in an evaluation and after it."""
STOPS = f"""
for number in {(0, *AT)}:
    for at in (number, 0)[: 1 + bool(number)]:
        assert start(sys.argv[1] + "/" + str(number), at, "checkpoint.every_steps=4") == (75 if at else 0), number
"""


def test_a_run_that_is_stopped_anywhere_reports_what_the_undisturbed_one_does(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = script(1, EPOCHS + STOPPED + STOPS, runs)
    assert done.code == 0, done.output
    calm = _reached(runs / "0")
    assert calm["best_accuracy"] == 0.9 and calm["accuracy"] == 0.5 and calm["test_loss"] == 0
    assert calm["logged"] == {"accuracy": 0.5, "wer": 0.5, "test_loss": 0}
    scores = product.scores(runs / "0")
    assert scores.items() >= {2: 0.3, 5: 0.9}.items() and max(scores.values()) == 0.9
    for number in AT:
        run_dir = runs / str(number)
        assert [event["saved"] for event in events(run_dir, "preempted")] == [True], number
        assert _reached(run_dir) == calm, number
        assert product.scores(run_dir).items() >= scores.items(), number


def _exported(run_dir: Path, out: Path, *words: str) -> tuple[str, dict[str, torch.Tensor]]:
    done = python("-m", "lockstep", "export", str(run_dir), str(out), *words)
    assert done.code == 0, done.output
    return done.output.strip(), torch.load(out, weights_only=True)


def test_the_best_of_an_epochs_scores_is_kept_with_the_weights_it_was_measured_on(tmp_path: Path) -> None:
    """The last score of an epoch counts, for the weights at its end. Any logged number can be the score, and the lowest
    can be the best."""
    lines = """
    made = make
    def make(run):
        global model
        model, optimizer = made(run)
        return model, optimizer
    def log(run, _log=Session.log, **numbers):
        torch.save(model.state_dict(), f"{sys.argv[1]}-{run.steps}.pt")
        _log(run, **numbers)
    Session.log = log
    train(sys.argv[1], "checkpoint.keep=1", checkpoint={"keep_best": {"wer": "min"}})
    """
    run_dir = tmp_path / "run"
    done = script(1, EPOCHS + textwrap.dedent(lines), run_dir)
    assert done.code == 0, done.output
    assert {step: round(score, 6) for step, score in product.scores(run_dir).items()} == {5: 0.1}
    assert _reached(run_dir)["best_accuracy"] == 0.9, "which is reported, whatever is kept"
    output, weights = _exported(run_dir, tmp_path / "best.pth", "--best")
    assert output.endswith("tensors of step 5")
    expected = torch.load(tmp_path / "run-5.pt", weights_only=True)
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    python("-m", "lockstep", "export", str(run_dir), str(tmp_path / "last.safetensors"))
    with safe_open(tmp_path / "last.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "classes": '["cat", "Bär"]', "width": "64"}
    assert _exported(run_dir, tmp_path / "named.pth", "--step", "5")[0].endswith("of step 5")
    for words, why in ((("--step", "7"), "5, 18"), (("--best", "--step", "5"), "--step")):
        done = python("-m", "lockstep", "export", str(run_dir), str(tmp_path / "none.pth"), *words)
        assert done.code == 2 and why in done.output and "Traceback" not in done.output, done.output
    (run_dir / "checkpoints/step-00000005/state.json").write_text("{}")
    done = python("-m", "lockstep", "export", str(run_dir), str(tmp_path / "none.pth"), "--best")
    assert done.code == 2 and "step-00000005/state.json" in done.output, done.output
    assert not (tmp_path / "none.pth").exists()


def test_a_score_of_some_ranks_hangs_none(tmp_path: Path) -> None:
    """Rank 0 alone logs a score, or the others alone, or all log different ones. Rank 0's score counts, and all ranks save together or
    not."""
    lines = """
with Session(sys.argv[1], "checkpoint.keep=100", "checkpoint.every_steps=100", "collective_timeout=20") as run:
    model, optimizer = make(run)
    for epoch in run.epochs(2):
        for batch in run.batches(DATA, 8):
            step(run, model, batch)
            if run.steps == 1 and run.leader:
                run.log(accuracy=0.5)
            if run.steps == 2 and not run.leader:
                run.log(accuracy=0.9)
            if run.steps == 3:
                run.log(accuracy=0.6 + run.rank, minutes=1.0 + run.rank)
            if run.steps == 5:
                run.log(accuracy=0.55 if run.leader else 3.0)
        if run.leader:
            run.log(accuracy=0.7 * (epoch + 1))
"""
    done = script(2, lines, tmp_path / "run")
    assert done.code == 0, done.output
    assert done.output.count("accuracy was logged on some ranks only") == 1, done.output
    assert done.output.count("run.log(accuracy=…) gets 0.6 on rank 0 and 1.6 on rank 1") == 1, done.output
    assert done.output.count("run.log(") == 1, "a time is a rank's own"
    assert product.scores(tmp_path / "run") == {3: 0.6, 4: 0.7, 8: 1.4}
    assert _reached(tmp_path / "run")["best_accuracy"] == 1.4


def test_a_score_of_weights_that_are_gone_at_the_boundary_is_no_checkpoints(tmp_path: Path) -> None:
    """Between the updates of one batch nothing can be saved, and a checkpoint after them holds other weights."""
    lines = """
with Session(sys.argv[1], "checkpoint.keep=100", "checkpoint.every_steps=1") as run:
    model, optimizer = make(run)
    for epoch in run.epochs(1):
        for batch in run.iterate([DATA[:8]] * 3):
            step(run, model, batch, samples=8)
            run.log(accuracy=run.steps / 10)
            step(run, model, batch, samples=8)
    run.log(accuracy=0.4)
"""
    done = script(1, lines, tmp_path / "run")
    assert done.code == 0, done.output
    assert product.scores(tmp_path / "run") == {6: 0.4}, "that of the end was measured on the last weights"
    reached = _reached(tmp_path / "run")
    assert reached["best_accuracy"] == 0.5 and reached["accuracy"] == 0.4
