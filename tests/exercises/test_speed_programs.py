"""The programs of benchmarks/ that compare with other code: their arithmetic, and one small run through all of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import contestants, scaling_model, speedrun
from benchmarks.contestants import Outcome
from tests.processes import ROOT, Result, clean_env
from tests.warm.gang import python


def outcomes(seconds: float, *accuracies: float) -> list[Outcome]:
    return [Outcome(seconds, 2 * seconds, accuracy) for accuracy in accuracies]


def test_the_gate_asks_for_confidence_not_for_luck() -> None:
    steady = [0.940, 0.941, 0.939, 0.940] * 5
    assert speedrun.gate(steady, steady)["passed"] is True
    slightly_worse = speedrun.gate([value - 0.0015 for value in steady], steady)
    assert slightly_worse["passed"] is False and slightly_worse["points"] == pytest.approx(-0.15)
    scattered = speedrun.gate([0.90, 0.98], [0.90, 0.98])  # no difference, and no confidence that there is none
    assert scattered["passed"] is False
    assert speedrun.gate([0.94], [0.90])["passed"] is None
    # Two runs know little of their own spread: what twenty of the same would prove, they do not.
    lucky, other = [0.9391, 0.9392], [0.9399, 0.9400]
    assert speedrun.gate(lucky, other)["passed"] is False and speedrun.gate(lucky * 10, other * 10)["passed"] is True


def test_each_peer_is_compared_by_the_clock_that_it_has_itself() -> None:
    runs = {"bag_of_tricks": outcomes(1, 0.94, 0.94), "speedrun": outcomes(1, 0.94, 0.94)}
    runs |= {"bag": outcomes(3, 0.94, 0.94), "airbench": outcomes(3, 0.93, 0.93)}
    rows = {row["ours"]: row for row in speedrun.compared(runs, {"speedrun": [2.0], "airbench": [8.0]})}
    assert rows["bag_of_tricks"]["own"] == 3 and rows["bag_of_tricks"]["whole"] == 3
    # airbench's own clock ends after its last evaluation: ours beside it is the whole.
    assert rows["speedrun"]["own"] == 1.5 and rows["speedrun"]["cold"] == 4
    assert rows["speedrun"]["accuracy"]["passed"] is True and "gate passed" in speedrun.table(
        runs, {}, list(rows.values())
    )


def test_the_projection_is_its_table_at_its_points_and_never_below_the_smallest_step() -> None:
    steps = [(2000.0, 8e-3), (250.0, 1e-3), (125.0, 1e-3)]
    eight = scaling_model.project(steps, 2000, 4e6, "h200", 8)
    assert eight["compute"] == pytest.approx(1e-3) and eight["slowest"] == pytest.approx(1e-3 + 68e-6)
    assert scaling_model.project(steps, 2000, 4e6, "h200", 64)["compute"] == 1e-3


def test_a_published_script_reads_images_from_the_device_and_its_clock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in the form of the published ones; they themselves are given by path and are not here."""
    data = _cifar10(tmp_path / "data")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "train.py").write_text(
        "import torch\n"
        "def preprocess_data(data, device, dtype):\n    return data.to(dtype).permute(0, 3, 1, 2)\n"
        "def load_cifar10(device, dtype):\n    raise RuntimeError('from the network')\n"
        "def train(seed):\n"
        "    x, y, test, answers = load_cifar10(torch.device('cpu'), torch.float32)\n"
        "    print(x.shape[-1], len(y), len(test), len(answers))\n    print('    1       97       12.50    0.4')\n    return 0.4\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = contestants.bag(str(checkout), str(data))(3)
    assert found.own == 12.5 and found.accuracy == 0.4 and 0 < found.whole < 10
    done = _program("contestants.py", "bag", str(checkout), str(data))
    assert done.code == 0 and json.loads(done.output)["accuracy"] == 0.4, done.error


def _program(name: str, *words: str, timeout: float = 240) -> Result:
    """One of benchmarks/, in one thread."""
    env = clean_env(OMP_NUM_THREADS="1", LOCKSTEP_THREADS="1")
    return python(str(ROOT / "benchmarks" / name), *words, env=env, timeout=timeout, apart=True)


def _cifar10(root: Path, count: int = 64) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        pixels = draw.integers(0, 256, (count, 3073), dtype=np.uint8)
        pixels[:, 0] = np.arange(count) % 10
        (folder / f"{name}.bin").write_bytes(pixels.tobytes())
    return root


def test_both_kinds_of_runs_end_in_a_table_and_a_file(tmp_path: Path) -> None:
    words = ["--data-root", str(_cifar10(tmp_path / "data")), "--ours", "bag_of_tricks", "--runs", "2", "--cold", "1"]
    words += ["--device", "cpu", "--out", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    words += ["--set", "model_options.width=0.0625", "epochs=1", "global_batch_size=64"]
    done = _program("speedrun.py", *words)
    assert done.code == 0, done.error
    result = json.loads((tmp_path / "out.json").read_text())
    ((own, whole, accuracy), *_) = result["runs"]["bag_of_tricks"]
    assert 0 < own < whole and 0 <= accuracy <= 1 and result["cold"]["bag_of_tricks"][0] > whole
    assert "bag_of_tricks" in done.output and (tmp_path / "out.png").stat().st_size > 1000


def test_what_the_gpu_benchmark_can_do_without_one_runs_to_its_file(tmp_path: Path) -> None:
    words = ["--data-root", str(_cifar10(tmp_path / "data")), "--device", "cpu", "--small"]
    words += ["--rounds", "1", "--runs", "1"]
    words += ["--ours", "bag_of_tricks", "--out", str(tmp_path / "out.json")]
    words += ["--set", "model_options.width=0.0625", "epochs=1", "global_batch_size=64"]
    done = _program("gpu.py", *words)
    assert done.code == 0, done.error
    result = json.loads((tmp_path / "out.json").read_text())
    for row in result["recipes"].values():
        assert row["milliseconds"]["eager"].keys() == {"64", "32"} and sum(k["share"] for k in row["kernels"]) <= 1
        assert row["projection_ms"]["1"]["compute"] == pytest.approx(row["milliseconds"]["eager"]["64"])
    assert len(result["trainings"]["runs"]["bag_of_tricks"]) == 1 and result["trainings"]["failed"] == {}


def test_a_peer_that_fails_costs_its_own_row_alone(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "train.py").write_text("raise RuntimeError('written for another torch')\n")
    words = ["--data-root", str(_cifar10(tmp_path / "data")), "--ours", "bag_of_tricks", "--bag", str(checkout)]
    words += ["--runs", "1", "--cold", "0", "--device", "cpu", "--out", str(tmp_path / "out.json")]
    words += ["--set", "model_options.width=0.0625", "epochs=1", "global_batch_size=64"]
    done = _program("speedrun.py", *words)
    assert done.code == 0 and "bag FAILED" in done.error, done.error
    result = json.loads((tmp_path / "out.json").read_text())
    assert "written for another torch" in result["failed"]["bag"] and list(result["runs"]) == ["bag_of_tricks"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_two_checkouts_are_compared_in_turn_and_the_record_names_them(tmp_path: Path) -> None:
    """This checkout beside itself; a rank that fails ends the comparison, and leaves no process."""
    words = ["--batch", "32", "--rounds", "2", "--starts", "2", "--recipes", "speedrun", "--strategies", "flat"]
    done = _program("revisions.py", str(ROOT), *words, "--out", str(tmp_path / "found.json"))
    assert done.code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["figures"].keys() == {f"speedrun, {ranks}: new / old rate" for ranks in ("1 rank", "2 ranks, flat")}
    assert found["revisions"]["old"] == found["revisions"]["new"]
    other = tmp_path / "old"
    (other / "benchmarks").mkdir(parents=True)
    refused = _program("revisions.py", str(other), *words)
    assert refused.code == 2 and f"error: {other} is no checkout of this project" in refused.error, refused
    (other / "benchmarks/__init__.py").touch()  # else the installed one is found before it
    (other / "benchmarks/our_step.py").write_text("raise SystemExit(7)\n")
    failed = _program("revisions.py", str(other), *words)
    assert failed.code == 2 and f"error: {other}: a rank ended with 7" in failed.error, failed


def test_without_a_gpu_the_gpu_benchmark_says_so(tmp_path: Path) -> None:
    for words in ([], ["--device", "cpu", "--airbench", str(tmp_path)]):
        done = _program("gpu.py", "--data-root", str(tmp_path), *words)
        assert done.code != 0 and "GPU" in done.error and "Traceback" not in done.error
