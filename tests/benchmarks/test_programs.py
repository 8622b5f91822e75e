"""Each program of benchmarks/ at its smallest sizes: it starts, prints its figures and writes its file. No test here looks at a speed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.pictures import write_cifar10
from tests.processes import PYTHON, clean_env, run
from tests.warm.gang import python

PROGRAMS = {
    "step": ("benchmarks/cpu_step.py --rounds 1 --batch 32 --no-compile", "2 ranks, resnet18, flat against ddp"),
    "checkpoint": ("benchmarks/checkpoint.py --rounds 1 --sizes 1", "1 MB, stall / torch.save + fsync"),
    "loader": (
        "benchmarks/loader.py --rounds 1 --images 140 --side 32 --size 16", "shards, read / DataLoader, 2 workers",
    ),
    "metrics": ("benchmarks/metrics.py --repeats 1000", "a step's calls: "),
    "scale": ("-m benchmarks.scale --ranks 2", "agreement, no error"),
    "peers": ("benchmarks/peers.py --peers Lightning Lockstep --rounds 1 --steps 2 --warm-up 1 --batch 2", "× as fast"),
    "own loop": ("-m benchmarks.own_loop.compare --loops Session --fates", '"changed_lines"'),
    "torture": ("-m benchmarks.torture.compare --peers torchrun --cases 1", "torchrun\n  term ["),
    "hangs": ("-m benchmarks.hangs --rounds 1 --kinds stop --quiet-jobs 1 --quiet-minutes 0.4", "1 of 1 right"),
    "gpu": ("benchmarks/gpu.py --device cpu --small --rounds 1", "bag_of_tricks: matmul "),
}  # fmt: skip
"""Name → (its arguments, a text that it prints)."""
ROW = r"^(\w+(?: \w+)?) +(\d) +(\d+) +([\d.]+) +[\d.]+× +([\d.]+) \|((?: +[\d.]+){4}) \| +[\d.]+ +[\d.]+$"
"""A row of the table of scaling."""


def _run(words: list[str], out: Path) -> tuple[str, dict[str, Any]]:
    """Returns a program's output and the JSON that it wrote."""
    # Lightning's warnings do not matter here.
    env = clean_env(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", LOCKSTEP_THREADS="1")
    result = run([PYTHON, *words, "--out", str(out)], env, timeout=240)
    assert result.code == 0 and str(out) in result.output, result.output
    return result.output, json.loads(out.read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name == "hangs" else []) for name in PROGRAMS]
)
def test_a_program_prints_its_figures_and_records_them(name: str, tmp_path: Path) -> None:
    if name == "peers" and find_spec("lightning") is None:
        pytest.skip("Lightning is not installed: pip install -e '.[peers]'")
    words, figure = PROGRAMS[name]
    output, result = _run(words.split(), tmp_path / "out.json")
    assert figure in output and result["machine"]["cores"] > 0
    assert all(row["median"] > 0 and row["n"] == 1 for row in result.get("figures", {}).values())


def test_scaling_prints_a_row_for_each_way_to_train_also_where_one_fails(tiny: list[str]) -> None:
    """The phases of the median step add up to it."""
    words = (
        f"--ranks 2 --steps 2 --rounds 1 --batch 12 --strategies {product.DATA_PARALLEL},{product.ALLREDUCE}".split()
    )
    settings = [word for word in tiny if not word.startswith(("data.", "model="))]
    result = python("-m", "benchmarks.scaling", *words, "--set", *settings, "model=tests.nets:Sociable", timeout=400)
    assert result.code == 0 and re.search(r"^DataParallel .*nobody is here", result.output, re.M), result.output
    rows = re.findall(ROW, result.output, re.M)
    assert [values[:3] for values in rows] == [("batch fixed", "2", "12"), ("AllReduce", "2", "12")], result.output
    for _, _, batch, rate, step, phases in rows:
        assert float(rate) == pytest.approx(1000 * int(batch) / float(step), rel=0.05)
        assert sum(map(float, phases.split())) == pytest.approx(float(step), abs=0.3)


def test_survivors_end_in_the_weights_of_the_undisturbed_run(tmp_path: Path) -> None:
    output, result = _run(["benchmarks/survivors.py", "--only", "live", "--rounds", "1"], tmp_path / "out.json")
    runs = result["runs"]["live"]
    assert {run["weights"] for run in runs} == {result["undisturbed"]["live"]["weights"]}, output
    assert all(kill["next_step"] > 0 for run in runs for kill in run["kills"]) and "live: next step" in output, output


def test_speedrun_and_a_peer_that_fails_costs_its_own_row_alone(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 64)
    (tmp_path / "train.py").write_text("raise RuntimeError('written for another torch')\n")
    words = ["--data-root", str(tmp_path), "--bag", str(tmp_path), "--ours", "bag_of_tricks", "--runs", "1"]
    words += ["--device", "cpu", "--set", "model_options.width=0.0625", "epochs=1", "global_batch_size=64"]
    output, result = _run(["benchmarks/speedrun.py", *words], tmp_path / "out.json")
    ((training, whole, accuracy),) = result["runs"].pop("bag_of_tricks")
    assert 0 < training < whole and 0 <= accuracy <= 1 and not result["runs"]
    assert "bag FAILED: written for another torch" in output and "written for another torch" in result["failed"]["bag"]
