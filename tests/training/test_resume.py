"""Killed after any step and run again: the same weights to the bit, and no sample twice or never."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import product
from tests.conftest import Undisturbed
from tests.events import events
from tests.runs import FINAL, LOSSY_START, Job, assert_same, tensors

THREE, TWO = ("0:5", "last:6", "1:16"), ("0:8", "last:9")
"""Rank and forward pass of each kill. A resumed start begins at the newest even step below, so: mid-epoch, one step after
an epoch's end, right before the run's end."""
TABLE = [
    ("ddp", 2, THREE),
    ("flat", 3, THREE),
    ("hooks", 2, TWO),
    ("zero1", 3, TWO),
    ("fsdp", 3, TWO),
    ("powersgd", 3, TWO),
]
"""One of each engine, and each that remembers something of its own."""


@pytest.mark.promise("kill-resume")
@pytest.mark.parametrize(("strategy", "ranks", "kills"), TABLE, ids=[f"{row[0]}-{row[1]}" for row in TABLE])
def test_killed_and_run_again(
    undisturbed: Undisturbed, tmp_path: Path, data_root: Path, strategy: str, ranks: int, kills: tuple[str, ...]
) -> None:
    """With batch statistics, dropout, an average and, for powersgd, error feedback that differs by rank."""
    job = Job(tmp_path / "run", data_root, ranks, **{"sync.name": strategy, **LOSSY_START.get(strategy, {})})
    for kill in kills:
        rank, passes = kill.replace("last", str(ranks - 1)).split(":")
        number = int(passes) + (strategy == "ddp")  # its warm-up pass counts, too
        died = job.go(LOCKSTEP_TEST_FATE=f"{rank}:{number}:KILL")
        assert died.code == 1, died.output
        assert json.loads((job.run_dir / "status.json").read_text())["code"] in (None, 1)
    done = job.go()
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    assert_same(job.run_dir, undisturbed(ranks, strategy))
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["restarts"] == len(kills) and summary["steps"] == FINAL
    resumed = [event["step"] for event in events(job.run_dir, "resumed")]
    assert [event["attempt"] for event in events(job.run_dir, "start")] == list(range(1, len(kills) + 2))
    assert resumed[0] in (2, 4, 6) and resumed == sorted(resumed) and resumed[-1] >= (20 if kills is THREE else 10)
    if strategy == "powersgd":
        errors = [tensor for place, tensor in tensors(job.run_dir).items() if ".sync.errors." in place]
        assert len(errors) == ranks and not torch.equal(errors[0], errors[1])


@pytest.mark.promise("kill-resume")
def test_every_single_step_can_be_the_last_one(undisturbed: Undisturbed, data_root: Path, tmp_path: Path) -> None:
    """A signal in the first pass of each start: saved after that one step."""
    job = Job(tmp_path / "run", data_root, 1)
    for step in range(1, FINAL):
        left = job.go(LOCKSTEP_TEST_FATE="0:1:TERM")
        assert left.code == 75 and job.steps()[0] == step, left.output
    assert job.go().code == 0
    assert_same(job.run_dir, undisturbed(1))


OF_A_START = ("restarts", "preemptions", "wall_seconds", "trained_seconds", "images_per_second")


def _reached(run_dir: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """A run's summary without what counts starts and times, and its checkpoints' scores."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return {name: value for name, value in summary.items() if name not in OF_A_START}, product.scores(run_dir)


@pytest.mark.promise("best-checkpoint")
def test_a_recipe_that_is_stopped_anywhere_reports_the_scores_of_the_undisturbed_run(
    data_root: Path, tmp_path: Path
) -> None:
    """Evaluated in mid-epoch, too, and the best of those scores is kept. Stopped before a score, in an evaluation, after it."""
    changes = {"log.score_every": 5, "checkpoint.keep": 50, "checkpoint.keep_best": "{test_loss: min}", "epochs": 2}
    calm = Job(tmp_path / "calm", data_root, 1, **changes)
    assert calm.go().code == 0
    summary, scores = _reached(calm.run_dir)
    told = {event["step"]: event["test_loss"] for name in ("score", "epoch") for event in events(calm.run_dir, name)}
    assert set(told) == {1, 6, 8, 11, 16}
    best = [step for step in told if told[step] < min([told[before] for before in told if before < step], default=1e9)]
    assert {step: told[step] for step in best}.items() <= scores.items() and len(best) > 1
    for stop in (1, 5, 6, -9, 12):  # passes; a negative one is of an evaluation, which has seven
        job = Job(tmp_path / str(stop), data_root, 1, **changes)
        assert job.go(LOCKSTEP_TEST_FATE=f"0:{stop}:TERM").code == 75, stop
        assert job.go().code == 0
        found, kept = _reached(job.run_dir)
        assert found == summary and kept.items() >= scores.items(), stop


@pytest.mark.promise("other-world-size")
@pytest.mark.parametrize("strategy", ["flat", "zero1", "fsdp"])
def test_another_world_size_goes_on_with_the_same_samples(strategy: str, tmp_path: Path, data_root: Path) -> None:
    """Without batch statistics and dropout, weights, average and scores are those of the undisturbed run, up to the order of
    summation. Killed on 2 ranks, preempted on 3, ended on 1."""
    changes = {
        "model": "tests.nets:DyingPlain",
        "precision": "float64",
        "optim.name": "adam",
        "lr": 0.001,
        "micro_batch_size": 6,
    }
    job, alone = (Job(tmp_path / name, data_root, 2, **changes, **{"sync.name": strategy}) for name in ("run", "whole"))
    assert job.go(LOCKSTEP_TEST_FATE="1:12:KILL").code == 1  # of two passes a step
    job.ranks = 3
    left = job.go(LOCKSTEP_TEST_FATE="1:9:TERM")
    assert left.code == 75 and "3 ranks on cpu" in left.output and "Resuming at step" in left.output, left.output
    job.ranks, alone.ranks = 1, 1
    assert job.go().code == alone.go().code == 0
    assert json.loads((job.run_dir / "summary.json").read_text())["global_batch_size"] == 24
    one, other = (product.checkpoint(j.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"] for j in (job, alone))
    for kind in ("model", "average"):
        for name, tensor in one[kind].items():
            torch.testing.assert_close(tensor, other[kind][name], rtol=1e-10, atol=1e-10, msg=f"{strategy}: {name}")
    epochs = [{event["epoch"]: event["test_loss"] for event in events(j.run_dir, "epoch")} for j in (job, alone)]
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-9) and len(epochs[0]) == 3
    assert one["history"]["train_loss"] == pytest.approx(other["history"]["train_loss"], rel=1e-10)


@pytest.mark.promise("damaged-checkpoints")
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_newest_checkpoint_costs_one_interval(
    undisturbed: Undisturbed, tmp_path: Path, data_root: Path, damage: str
) -> None:
    job = Job(tmp_path / "run", data_root, 2)
    assert job.go(LOCKSTEP_TEST_FATE="1:12:KILL").code == 1
    newest = job.run_dir / f"checkpoints/step-{job.steps()[0]:08d}/state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    done = job.go()
    assert done.code == 0 and "corrupt" in done.output and "state.safetensors" in done.output, done.output
    assert_same(job.run_dir, undisturbed(2))


@pytest.mark.promise("damaged-checkpoints")
def test_all_checkpoints_damaged_is_exit_2_and_nothing_is_overwritten(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 1, epochs=1)
    run = job.run_dir
    assert job.go().code == 0
    for path in run.glob("checkpoints/step-*/state.json"):
        path.write_bytes(b"{}")
    told = ("events.jsonl", "status.json", "rank-00000.prom")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told}
    done = job.go()
    assert done.code == 2 and "can be verified: restore one" in done.output and "Traceback" not in done.output
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told} == before
    assert json.loads((run / "status.json").read_text())["code"] == 2


def test_own_slices_cannot_be_resumed_at_another_world_size(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 2, **{"data.shuffle": "shard"})
    died = job.go(LOCKSTEP_TEST_FATE="1:12:KILL")
    assert died.code == 1, died.output
    job.ranks = 3
    refused = job.go()
    assert refused.code == 2 and "resume it on 2 ranks, not 3" in refused.output, refused.output
    job.ranks = 2
    assert job.go().code == 0


@pytest.mark.parametrize(("optimizer", "sync"), [("muon", "flat"), ("adam", "zero1")])
def test_channels_last_goes_on_bit_for_bit(optimizer: str, sync: str, data_root: Path, tmp_path: Path) -> None:
    """Neither a checkpoint nor an optimizer's state forgets the layout; fused optimizers would mix up elements."""
    changes = {"channels_last": "true", "optim.name": optimizer, "lr": 0.005, "optim.momentum": 0.6, "sync.name": sync}
    whole, cut = (Job(tmp_path / name, data_root, 1, **changes) for name in ("whole", "cut"))
    assert whole.go().code == 0
    assert cut.go(LOCKSTEP_TEST_FATE="0:12:KILL").code == -signal.SIGKILL
    assert cut.go().code == 0
    assert_same(cut.run_dir, tensors(whole.run_dir))


@pytest.mark.promise("not-finite")
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_divergence_is_seen_by_all_ranks_where_each_holds_a_part(
    strategy: str, data_root: Path, tmp_path: Path
) -> None:
    done = Job(tmp_path / "run", data_root, 2, **{"sync.name": strategy, "lr": 1e30}).go()
    assert done.code == 1 and "diverged at step 2: rank 0: loss" in done.output and "; rank 1: loss" in done.output, (
        done
    )


@pytest.mark.promise("not-finite")
def test_powersgd_forgets_what_a_nan_has_left_in_its_memory(data_root: Path, tmp_path: Path) -> None:
    changes = {"sync.name": "powersgd", **LOSSY_START["powersgd"], "nonfinite": "skip"}
    job = Job(tmp_path / "run", data_root, 2, **changes)
    done = job.go(LOCKSTEP_TEST_FATE="1:8:NANINPUT")  # its warm-up pass counts too
    assert done.code == 0 and "left out step 7: " in done.output and "left out step 8" not in done.output, done.output
    assert all(bool(torch.isfinite(t).all()) for t in tensors(job.run_dir).values() if t.is_floating_point())
