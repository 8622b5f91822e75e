"""Killed after any step and run again: the same weights to the bit, and no sample twice or never."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.events import events
from tests.processes import clean_env, gang, training
from training import checkpoint

FINAL = 24


def _settings(data_root: Path, strategy: str, **changes: object) -> list[str]:
    values = {
        "data.root": data_root, "data.source": "synthetic", "data.options": "{n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards": 3, "augment.crop": 1, "augment.flip": "random", "model": "tests.nets:Dying",
        "model_options": "{}", "global_batch_size": 24, "uneven": "drop", "epochs": 3, "evaluate.every": 1,
        "checkpoint.every_steps": 2, "sync.name": strategy, "ema.decay": 0.9, "ema.every": 3, **changes,
    }  # fmt: skip
    return ["--set", *(f"{name}={value}" for name, value in values.items())]


def _state(run: Path, step: int = FINAL) -> dict[str, torch.Tensor]:
    tree = checkpoint.load(run / "checkpoints" / f"step-{step:08d}")
    shared, ranks = tree["shared"], tree["ranks"]
    tensors = {f"model.{name}": tensor for name, tensor in shared["model"].items()}
    tensors |= {f"average.{name}": tensor for name, tensor in shared["average"].items()}
    for index, entry in shared["optimizer"]["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
    for number, rank in enumerate(ranks):
        tensors |= {f"rank{number}.{name}": tensor for name, tensor in rank["buffers"].items()}
        tensors[f"rank{number}.rng"] = rank["rng"]["torch"]
    return tensors


def _assert_same(run: Path, undisturbed: Path) -> None:
    one, other = _state(run), _state(undisturbed)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> dict[tuple[int, str], Path]:
    runs = {}
    for ranks in (2, 3):
        for strategy in ("ddp", "flat"):
            run = tmp_path_factory.mktemp("undisturbed") / "run"
            done = gang(ranks, "run", "smoke", "--run-dir", str(run), *_settings(data_root, strategy))
            assert done.code == 0, done.output
            runs[ranks, strategy] = run
    return runs


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "flat"])
def test_killed_three_times_and_run_again(
    undisturbed: dict[tuple[int, str], Path], tmp_path: Path, data_root: Path, ranks: int, strategy: str
) -> None:
    """Rank 0 dies mid-epoch, the last rank one step after an epoch's end, rank 1 right before the run's end."""
    run = tmp_path / "run"
    warm_up = 1 if strategy == "ddp" else 0
    # Forward passes of each start: resumed at the newest even step below the kill.
    for fate in (f"0:{5 + warm_up}:KILL", f"{ranks - 1}:{6 + warm_up}:KILL", f"1:{16 + warm_up}:KILL"):
        env = clean_env(LOCKSTEP_TEST_FATE=fate)
        died = gang(ranks, "run", "smoke", "--run-dir", str(run), *_settings(data_root, strategy), env=env)
        assert died.code == 1, died.output
        assert json.loads((run / "status.json").read_text())["code"] in (None, 1)
    done = gang(ranks, "run", "smoke", "--run-dir", str(run), *_settings(data_root, strategy))
    assert done.code == 0, done.output
    assert "Resuming at step 2" in done.output
    _assert_same(run, undisturbed[ranks, strategy])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == 3 and summary["steps"] == FINAL
    resumed = [event["step"] for event in events(run, "resumed")]
    assert [event["attempt"] for event in events(run, "start")] == [1, 2, 3, 4]
    assert resumed[0] in (2, 4) and resumed == sorted(resumed) and resumed[-1] >= 20


def test_every_single_step_can_be_the_last_one(data_root: Path, tmp_path: Path) -> None:
    """One rank in process: the run is stopped after each of its first 9 steps in turn, and continued."""
    whole = training("run", "smoke", "--run-dir", str(tmp_path / "whole"), *_settings(data_root, "flat"))
    assert whole.code == 0, whole.output
    code = f"""
import pathlib, sys
from training import config, loop, world
from training.preempt import Consensus, Decision
words = {_settings(data_root, "flat")[1:]!r}
with world.joined(world.detect({{}})) as me:
    world.set_threads(me, 2, {{}})
    attempts = 0
    while True:
        polls = [0]
        def poll(self, save_due=False):
            polls[0] += 1
            return Decision(stop=polls[0] == 2 and attempts < 20)
        Consensus.poll = poll
        code = loop.train(config.load("smoke", words), me, pathlib.Path({str(tmp_path / "run")!r}))
        attempts += 1
        if code == 0:
            break
        assert code == 75
print("attempts", attempts)
"""
    from tests.processes import PYTHON, run

    done = run([PYTHON, "-c", code], clean_env(OMP_NUM_THREADS="2"))
    assert done.code == 0 and "attempts 21" in done.output, done.output
    one, other = (checkpoint.load(tmp_path / name / "checkpoints" / f"step-{FINAL:08d}") for name in ("run", "whole"))
    for name, tensor in one["shared"]["model"].items():
        assert torch.equal(tensor, other["shared"]["model"][name]), name


def test_another_world_size_goes_on_with_the_same_samples(tmp_path: Path, data_root: Path) -> None:
    """Without batch statistics and dropout the weights are those of the undisturbed run, up to the order of summation."""
    run = tmp_path / "run"
    settings = _settings(data_root, "flat", **{"model": "tests.nets:DyingPlain", "precision": "float64", "lr": 0.001})
    words = ("run", "smoke", "--run-dir", str(run), *settings)
    died = gang(2, *words, env=clean_env(LOCKSTEP_TEST_FATE="1:12:KILL"))
    assert died.code == 1
    done = gang(3, *words)
    assert done.code == 0 and "3 ranks on cpu" in done.output and "Resuming at step" in done.output, done.output
    assert json.loads((run / "summary.json").read_text())["global_batch_size"] == 24
    whole = training("run", "smoke", "--run-dir", str(tmp_path / "whole"), *settings)
    assert whole.code == 0, whole.output
    one, other = (
        checkpoint.load(path / "checkpoints" / f"step-{FINAL:08d}")["shared"] for path in (run, tmp_path / "whole")
    )
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, other["model"][name], rtol=1e-10, atol=1e-10)
    assert one["history"]["train_loss"] == pytest.approx(other["history"]["train_loss"], rel=1e-10)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_newest_checkpoint_costs_one_interval(
    undisturbed: dict[tuple[int, str], Path], tmp_path: Path, data_root: Path, damage: str
) -> None:
    run = tmp_path / "run"
    words = ("run", "smoke", "--run-dir", str(run), *_settings(data_root, "flat"))
    assert gang(2, *words, env=clean_env(LOCKSTEP_TEST_FATE="1:12:KILL")).code == 1
    newest = checkpoint.candidates(run / "checkpoints")[0] / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    done = gang(2, *words)
    assert done.code == 0, done.output
    assert "checkpoint is corrupt and not used" in done.output and "state.safetensors" in done.output
    _assert_same(run, undisturbed[2, "flat"])


def test_own_slices_cannot_be_resumed_at_another_world_size(data_root: Path, tmp_path: Path) -> None:
    words = (
        "run",
        "smoke",
        "--run-dir",
        str(tmp_path / "run"),
        *_settings(data_root, "flat", **{"data.shuffle": "shard"}),
    )
    died = gang(2, *words, env=clean_env(LOCKSTEP_TEST_FATE="1:12:KILL"))
    assert died.code == 1, died.output
    refused = gang(3, *words)
    assert refused.code == 2 and "resume it on 2 ranks, not 3" in refused.output, refused.output
    assert gang(2, *words).code == 0


@pytest.mark.parametrize(
    ("optimizer", "sync", "state"),
    [
        ("muon", "flat", "velocity"),
        ("nesterov", "ddp", "velocity"),
        ("sgd", "zero1", "momentum_buffer"),
        ("adam", "flat", "exp_avg_sq"),
    ],
)
def test_channels_last_goes_on_bit_for_bit(
    optimizer: str, sync: str, state: str, data_root: Path, tmp_path: Path
) -> None:
    """Neither a checkpoint nor an optimizer's state forgets the layout; fused optimizers would mix up elements."""
    rate = {"muon": 0.05, "nesterov": 0.02, "sgd": 0.02, "adam": 0.002}[optimizer]
    changes = {"channels_last": "true", "optim.name": optimizer, "lr": rate, "optim.momentum": 0.6}
    words = _settings(data_root, sync, **changes)
    whole, cut = (("run", "smoke", "--run-dir", str(tmp_path / name), *words) for name in ("whole", "cut"))
    assert training(*whole).code == 0
    assert training(*cut, env=clean_env(LOCKSTEP_TEST_FATE="0:12:KILL")).code != 0
    assert training(*cut).code == 0
    expected, found = _state(tmp_path / "whole"), _state(tmp_path / "cut")
    assert expected.keys() == found.keys() and any(state in name for name in found)
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


def test_all_checkpoints_damaged_is_exit_2_and_nothing_is_overwritten(data_root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("run", "smoke", "--run-dir", str(run), *_settings(data_root, "flat", epochs=1))
    assert training(*words).code == 0
    for path in checkpoint.candidates(run / "checkpoints"):
        (path / "state.json").write_bytes(b"{}")
    told = ("events.jsonl", "status.json", "rank-00000.prom")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told}
    done = training(*words)
    assert done.code == 2 and "checkpoints" in done.output and "verifies: restore one" in done.output
    assert "Traceback" not in done.output
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in told} == before
    assert json.loads((run / "status.json").read_text())["code"] == 2
