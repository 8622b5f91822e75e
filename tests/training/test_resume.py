"""Killed after any step and run again: the same weights to the bit, and no sample twice or never."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.training import config
from lockstep.training.checkpoint import store
from lockstep.training.parallel.world import World
from lockstep.training.resilience.preempt import Consensus, Decision
from lockstep.training.run import recipe
from tests.conftest import Undisturbed
from tests.events import events
from tests.ranks import on_ranks
from tests.runs import FINAL, LOSSY_START, Job, assert_same, tensors

THREE, TWO = ("0:5", "last:6", "1:16"), ("0:8", "last:9")
"""Rank and forward pass of each kill. A resumed start begins at the newest even step below, so: mid-epoch, one step after
an epoch's end, right before the run's end."""
TABLE = [
    ("ddp", 2, THREE), ("ddp", 3, TWO), ("flat", 2, TWO), ("flat", 3, THREE), ("allreduce", 2, TWO), ("hooks", 2, TWO),
    ("horovod", 2, TWO), ("bf16_compress", 2, TWO), ("zero1", 3, TWO), ("fsdp", 3, TWO), ("powersgd", 3, TWO),
]  # fmt: skip


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
    assert resumed[0] in (2, 4, 6) and resumed == sorted(resumed)
    assert resumed[-1] >= (20 if kills is THREE else 10), resumed
    if strategy == "powersgd":
        errors = [tensor for place, tensor in tensors(job.run_dir).items() if ".sync.errors." in place]
        assert len(errors) == ranks and not torch.equal(errors[0], errors[1])


def _stopped_after_each_step(world: World, words: list[str], run_dir: str) -> int:
    """How often the run had to be started until it was done; the first 20 starts end after a single step."""
    polls = [0]

    def poll(self: Consensus, save_due: bool = False, score: bool | None = None) -> Decision:
        polls[0] += 1
        return Decision(stop=polls[0] == 2 and attempts < 20)

    Consensus.poll = poll  # type: ignore[method-assign]
    attempts, code = 0, 75
    while code:
        assert code == 75
        polls[0] = 0
        code = recipe.train(config.load("smoke", words), world, Path(run_dir))
        attempts += 1
    return attempts


def test_every_single_step_can_be_the_last_one(undisturbed: Undisturbed, data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 1)
    words = job.words[job.words.index("--set") + 1 :]
    assert on_ranks(_stopped_after_each_step, 1, words, str(job.run_dir)) == [21]
    found, whole = tensors(job.run_dir), undisturbed(1)
    # Each start of a process seeds Python's generator anew, and these starts are one process.
    assert [place for place in whole if not torch.equal(found[place], whole[place])] == []


def _scored(world: World, words: list[str], run_dir: str, stops: list[int]) -> dict[int, tuple[Any, dict[int, float]]]:
    """Of a run that was asked to stop at that poll (0: none), and then went on: its summary, and its checkpoints' scores."""
    polls, found = [0], {}
    Consensus._wants_stop = lambda self: (polls.append(polls[-1] + 1), polls[-1] == stop)[1]  # type: ignore[method-assign]
    for stop in stops:
        path, codes = Path(run_dir) / str(stop), []
        while not codes or codes[-1]:
            polls[:] = [0 if not codes else 1000]
            codes.append(recipe.train(config.load("smoke", words), world, path))
        assert codes == ([75, 0] if stop else [0])
        summary = json.loads((path / "summary.json").read_text())
        for name in ("restarts", "preemptions", "wall_seconds", "trained_seconds", "images_per_second"):
            del summary[name]
        scores = {store.step_of(one): store.verify(one)["score"] for one in store.candidates(path / "checkpoints")}
        found[stop] = summary, {step: score for step, score in scores.items() if score is not None}
    return found


def test_a_recipe_that_is_stopped_anywhere_reports_the_scores_of_the_undisturbed_run(
    data_root: Path, tmp_path: Path
) -> None:
    """Evaluated in mid-epoch, too, and the best of those scores is kept."""
    changes = {"log.score_every": 5, "checkpoint.keep": 50, "checkpoint.keep_best": "{test_loss: min}", "epochs": 2}
    job = Job(tmp_path / "run", data_root, 1, **changes)
    stops = [0, 3, 6, 7, 12, 18]
    (found,) = on_ranks(_scored, 1, job.words[job.words.index("--set") + 1 :], str(job.run_dir), stops)
    summary, scores = found[0]
    told = {event["step"]: event["test_loss"] for event in events(job.run_dir / "0", "score")}
    told |= {event["step"]: event["test_loss"] for event in events(job.run_dir / "0", "epoch")}
    assert set(told) == {1, 6, 8, 11, 16}
    best = [step for step in told if told[step] < min([told[before] for before in told if before < step], default=1e9)]
    assert {step: told[step] for step in best}.items() <= scores.items() and len(best) > 1
    for stop in stops[1:]:
        assert found[stop][0] == summary and found[stop][1].items() >= scores.items(), stop


def test_another_world_size_goes_on_with_the_same_samples(tmp_path: Path, data_root: Path) -> None:
    """Without batch statistics and dropout the weights are those of the undisturbed run, up to the order of summation."""
    changes = {"model": "tests.nets:DyingPlain", "precision": "float64", "lr": 0.001}
    job, alone = Job(tmp_path / "run", data_root, 2, **changes), Job(tmp_path / "whole", data_root, 1, **changes)
    assert job.go(LOCKSTEP_TEST_FATE="1:12:KILL").code == 1
    job.ranks = 3
    done = job.go()
    assert done.code == 0 and "3 ranks on cpu" in done.output and "Resuming at step" in done.output, done.output
    assert json.loads((job.run_dir / "summary.json").read_text())["global_batch_size"] == 24
    assert alone.go().code == 0
    one, other = (store.load(j.run_dir / f"checkpoints/step-{FINAL:08d}")["shared"] for j in (job, alone))
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, other["model"][name], rtol=1e-10, atol=1e-10)
    assert one["history"]["train_loss"] == pytest.approx(other["history"]["train_loss"], rel=1e-10)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_newest_checkpoint_costs_one_interval(
    undisturbed: Undisturbed, tmp_path: Path, data_root: Path, damage: str
) -> None:
    job = Job(tmp_path / "run", data_root, 2)
    assert job.go(LOCKSTEP_TEST_FATE="1:12:KILL").code == 1
    newest = store.candidates(job.run_dir / "checkpoints")[0] / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    done = job.go()
    assert done.code == 0, done.output
    assert "checkpoint is corrupt and not used" in done.output and "state.safetensors" in done.output
    assert_same(job.run_dir, undisturbed(2))


def test_own_slices_cannot_be_resumed_at_another_world_size(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 2, **{"data.shuffle": "shard"})
    died = job.go(LOCKSTEP_TEST_FATE="1:12:KILL")
    assert died.code == 1, died.output
    job.ranks = 3
    refused = job.go()
    assert refused.code == 2 and "resume it on 2 ranks, not 3" in refused.output, refused.output
    job.ranks = 2
    assert job.go().code == 0


@pytest.mark.parametrize(
    ("optimizer", "sync", "state"),
    [
        ("muon", "flat", "velocity"), ("nesterov", "ddp", "velocity"), ("sgd", "zero1", "momentum_buffer"),
        ("adam", "flat", "exp_avg_sq"),
    ],
)  # fmt: skip
def test_channels_last_goes_on_bit_for_bit(
    optimizer: str, sync: str, state: str, data_root: Path, tmp_path: Path
) -> None:
    """Neither a checkpoint nor an optimizer's state forgets the layout; fused optimizers would mix up elements."""
    rate = {"muon": 0.05, "nesterov": 0.02, "sgd": 0.02, "adam": 0.002}[optimizer]
    changes: dict[str, Any] = {"channels_last": "true", "optim.name": optimizer, "lr": rate, "optim.momentum": 0.6}
    whole, cut = (Job(tmp_path / name, data_root, 1, **{"sync.name": sync, **changes}) for name in ("whole", "cut"))
    assert whole.go().code == 0
    assert cut.go(LOCKSTEP_TEST_FATE="0:12:KILL").code == -signal.SIGKILL
    assert cut.go().code == 0
    expected = tensors(whole.run_dir)
    assert any(state in place for place in expected)
    assert_same(cut.run_dir, expected)


def test_all_checkpoints_damaged_is_exit_2_and_nothing_is_overwritten(data_root: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", data_root, 1, epochs=1)
    run = job.run_dir
    assert job.go().code == 0
    for path in store.candidates(run / "checkpoints"):
        (path / "state.json").write_bytes(b"{}")
    told = ("events.jsonl", "status.json", "rank-00000.prom")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told}
    done = job.go()
    assert done.code == 2 and "checkpoints" in done.output and "can be verified: restore one" in done.output
    assert "Traceback" not in done.output
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told} == before
    assert json.loads((run / "status.json").read_text())["code"] == 2


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_a_divergence_is_seen_by_all_ranks_where_each_holds_a_part(
    strategy: str, data_root: Path, tmp_path: Path
) -> None:
    done = Job(tmp_path / "run", data_root, 2, **{"sync.name": strategy, "lr": 1e30}).go()
    assert done.code == 1, done.output
    assert "the run diverged at step 2: rank 0: loss is not finite" in done.output, done.output
    assert "; rank 1: loss is" in done.output


def test_powersgd_forgets_what_a_nan_has_left_in_its_memory(data_root: Path, tmp_path: Path) -> None:
    changes = {"sync.name": "powersgd", **LOSSY_START["powersgd"], "nonfinite": "skip"}
    job = Job(tmp_path / "run", data_root, 2, **changes)
    done = job.go(LOCKSTEP_TEST_FATE="1:8:NANINPUT")  # its warm-up pass counts too
    assert done.code == 0 and "left out step 7: " in done.output and "left out step 8" not in done.output, done.output
    assert all(bool(torch.isfinite(t).all()) for t in tensors(job.run_dir).values() if t.is_floating_point())
