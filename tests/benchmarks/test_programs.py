"""Each program of benchmarks/ at its smallest sizes: it starts, prints its figures and writes its file. No test here looks at a speed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import PYTHON, clean_env, run


def _run(words: Sequence[str], out: Path) -> tuple[str, Any]:
    """What a program printed and wrote."""
    # Lightning warns of what is none of our business.
    env = clean_env(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", LOCKSTEP_THREADS="1")
    done = run([PYTHON, *words, "--out", str(out)], env, timeout=240)
    assert done.code == 0 and str(out) in done.output, done.output
    return done.output, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        (["benchmarks/cpu_step.py", "--rounds", "1", "--batch", "32", "--no-compile"], "2 ranks, resnet18, flat against ddp"),
        (["benchmarks/checkpoint.py", "--rounds", "1", "--sizes", "1"], "1 MB, stall / torch.save + fsync"),
        (["benchmarks/loader.py", "--rounds", "1", "--images", "140", "--side", "32", "--size", "16"],
         "shards, read / DataLoader, 2 workers"),
        (["benchmarks/loops.py", ".", "--rounds", "1", "--recipes", "mlp", "--ranks", "1"], "mlp, 1 rank, images, new / old"),
    ],
    ids=["step", "checkpoint", "loader", "loops"],
)  # fmt: skip
def test_a_program_prints_its_figures_and_records_them(words: list[str], figure: str, tmp_path: Path) -> None:
    output, result = _run(words, tmp_path / "out.json")
    assert figure in output and all(row["median"] > 0 for row in result["figures"].values())
    assert 0 <= result["machine"]["others"] <= 1 and result["figures"][figure]["n"] == 1


def test_metrics(tmp_path: Path) -> None:
    output, result = _run(["benchmarks/metrics.py", "--repeats", "1000"], tmp_path / "out.json")
    assert "a step's calls: " in output and 50 < result["calls"]["series"] <= 100
    assert 0 < result["calls"]["render_seconds"] < result["calls"]["scrape_seconds"]


def test_scale(tmp_path: Path) -> None:
    output, result = _run(["-m", "benchmarks.scale", "--ranks", "2"], tmp_path / "out.json")
    assert "agreement, no error" in output and result["ranks"]["2"]["a start"]["messages"]["total"] > 0


@pytest.mark.parametrize("peer", ["plain DDP", "Lightning"])
def test_peers(peer: str, tmp_path: Path) -> None:
    if peer != "plain DDP" and importlib.util.find_spec(peer.lower()) is None:
        pytest.skip(f"{peer} is not installed: pip install -e '.[peers]'")
    words = ["--peers", peer, "Lockstep", "--rounds", "1", "--steps", "2", "--warm-up", "1", "--batch", "2"]
    output, result = _run(["benchmarks/peers.py", *words], tmp_path / "out.json")
    assert f"{result['peers'][peer]['lockstep_over_it']:9.2f} × as fast" in output


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    (root / "cifar-10-batches-bin").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 3073), dtype=np.uint8)
    pixels[:, 0] = np.arange(64) % 10
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (root / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(pixels.tobytes())
    return root


def test_gpu_without_one(tmp_path: Path) -> None:
    words = ["benchmarks/gpu.py", "--device", "cpu", "--small", "--rounds", "1"]
    output, result = _run(words, tmp_path / "out.json")
    for recipe, row in result["recipes"].items():
        assert f"{recipe}: matmul " in output and row["milliseconds"]["eager"].keys() == {"64", "32"}
        assert 0 < sum(kernel["share"] for kernel in row["kernels"]) <= 1 and "failed" not in row


def test_speedrun_and_a_peer_that_fails_costs_its_own_row_alone(cifar10: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('written for another torch')\n")
    words = [
        "--data-root",
        str(cifar10),
        "--ours",
        "bag_of_tricks",
        "--bag",
        str(tmp_path),
        "--runs",
        "1",
        "--device",
        "cpu",
    ]
    words += ["--set", "model_options.width=0.0625", "epochs=1", "global_batch_size=64"]
    output, result = _run(["benchmarks/speedrun.py", *words], tmp_path / "out.json")
    ((own, whole, accuracy),) = result["runs"].pop("bag_of_tricks")
    assert 0 < own < whole and 0 <= accuracy <= 1 and not result["runs"]
    assert "bag FAILED: written for another torch" in output and "written for another torch" in result["failed"]["bag"]


def test_the_gate_asks_for_confidence_not_for_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    from benchmarks.speedrun import gate

    steady = [0.940, 0.941, 0.939, 0.940] * 5
    assert gate(steady, steady)["passed"] is True
    assert gate([value - 0.0015 for value in steady], steady)["passed"] is False
    assert gate([0.90, 0.98], [0.90, 0.98])["passed"] is False  # no difference, and no confidence that there is none
    assert gate([0.94], [0.90])["passed"] is None
