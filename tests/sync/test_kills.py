"""Killed and run again, under every strategy: the same weights to the bit at the same world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.processes import clean_env, gang
from training import checkpoint

FINAL = 24
STRATEGIES = {
    "allreduce": "{}", "hooks": "{}", "horovod": "{}", "zero1": "{}", "fsdp": "{}", "bf16_compress": "{}",
    "powersgd": "{rank: 1, start: 3}",
}  # fmt: skip


def _words(data_root: Path, run: Path, strategy: str) -> list[str]:
    values = {
        "data.root": data_root, "data.source": "synthetic", "data.options": "{n: 192, n_test: 50, size: 8, noise: 1.5}",
        "data.num_shards": 3, "augment.crop": 1, "augment.flip": "random", "model": "tests.nets:Dying",
        "model_options": "{}", "global_batch_size": 24, "uneven": "drop", "epochs": 3, "evaluate.every": 1,
        "checkpoint.every_steps": 2, "sync.name": strategy, "sync.options": STRATEGIES[strategy], "ema.decay": 0.9,
        "ema.every": 3,
    }  # fmt: skip
    return ["run", "smoke", "--run-dir", str(run), "--set", *(f"{name}={value}" for name, value in values.items())]


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, by its place."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: object, place: str) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{place}.{name}")
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                walk(inner, f"{place}.{number}")

    walk(checkpoint.load(run / "checkpoints" / f"step-{FINAL:08d}"), "")
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_twice_and_run_again(strategy: str, data_root: Path, tmp_path: Path) -> None:
    """With batch statistics, dropout, an average and, for powersgd, error feedback that differs by rank."""
    ranks = 3 if strategy in ("zero1", "fsdp", "powersgd") else 2
    whole = gang(ranks, *_words(data_root, tmp_path / "whole", strategy))
    assert whole.code == 0, whole.output
    words = _words(data_root, tmp_path / "run", strategy)
    for fate in ("0:8:KILL", f"{ranks - 1}:9:KILL"):
        assert gang(ranks, *words, env=clean_env(LOCKSTEP_TEST_FATE=fate)).code == 1
    done = gang(ranks, *words)
    assert done.code == 0 and "Resuming at step" in done.output, done.output
    one, other = _tensors(tmp_path / "run"), _tensors(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert [place for place in one if not torch.equal(one[place], other[place])] == []
    if strategy == "powersgd":
        errors = [tensor for place, tensor in one.items() if ".sync.errors." in place]
        assert len(errors) == ranks and not torch.equal(errors[0], errors[1])


def test_a_nan_is_named_and_left_out_under_a_sharded_strategy(data_root: Path, tmp_path: Path) -> None:
    for strategy, option in (("fsdp", "stop"), ("zero1", "stop"), ("powersgd", "skip")):
        run = tmp_path / strategy
        words = [*_words(data_root, run, strategy), f"nonfinite={option}"]
        fate = "1:7:NANINPUT" if strategy != "powersgd" else "1:8:NANINPUT"
        done = gang(2, *words, env=clean_env(LOCKSTEP_TEST_FATE=fate))
        assert "step 7: rank 1: loss is not finite" in done.output, done.output
        if option == "stop":
            assert done.code == 1
        else:
            assert done.code == 0, done.output
            assert all(bool(torch.isfinite(t).all()) for t in _tensors(run).values() if t.is_floating_point())
