"""The modules' programs in examples/modules: collectives, matrix product, early steps, gathered predictions, inference, the toy."""

from __future__ import annotations

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import PYTHON, ROOT, Result, clean_env, run
from tests.warm.gang import python, running

pytestmark = pytest.mark.promise("modules")

MODULES = ROOT / "examples/modules"


def _program(ranks: int, *words: str) -> Result:
    with running([[str(MODULES / words[0]), *words[1:]]] * ranks) as started:
        return started.wait(240)


OUTPUT_LINES = """\
send, recv   a running sum from rank to rank: [1.0]
broadcast    rank 0's number, on every rank: [1.0]
scatter      of rank 0's list to each rank one: [10.0]
gather       the numbers of all, on rank 0: [1.0, 2.0, 3.0]
reduce       their sum, on rank 0: [6.0]
all_reduce   their sum, on every rank: [6.0]
all_gather   the numbers of all, on every rank: [1.0, 2.0, 3.0]
"""


@pytest.mark.parametrize(("size", "m", "k", "n"), [(1, 7, 5, 3), (3, 2, 9, 4), (3, 1, 1, 1)])
def test_each_collective_says_what_it_did_and_both_products_are_that_of_one_process(
    size: int, m: int, k: int, n: int
) -> None:
    done = _program(size, "collectives.py", "--sizes", str(m), str(k), str(n))
    assert done.code == 0 and "both are the product of one process" in done.output, done.output
    rows, inner, peers = -(-m // size), -(-k // size), size - 1
    bytes_per_peer = [4 * k * n, 4 * rows * k, 4 * rows * n, 4 * inner * m, 4 * inner * n, 8 * m * n]
    counts = re.findall(r"(?:broadcast|scatter|gather|all-reduce) [ABC] ([\d,]+)", done.output)
    assert [int(count.replace(",", "")) for count in counts] == [count * peers for count in bytes_per_peer]
    assert size == 1 or all(line in done.output for line in OUTPUT_LINES.splitlines()), done.output


def test_a_parameter_that_steps_when_its_sum_is_there_ends_where_the_plain_step_does() -> None:
    done = _program(2, "step_early.py")
    assert done.code == 0 and "the same weights" in done.output, done.output
    most, whole = re.findall(r"[\d,]{5,}", done.output)
    assert int(most.replace(",", "")) < int(whole.replace(",", "")) / 2, done.output


def test_the_example_gathers_predictions_to_rank_0(tmp_path: Path) -> None:
    out = tmp_path / "predictions.json"
    done = _program(3, "gather_predictions.py", str(out))
    assert done.code == 0, done.output
    content = json.loads(out.read_text())
    assert len(content["predictions"]) == 359 and content["parts"] == [120, 120, 119] and content["accuracy"] > 0.85


@pytest.mark.parametrize("model", ["resnet18", "fashion_cnn"])
def test_inference_says_where_data_parallel_is_a_pass_through(model: str) -> None:
    words = ["--model", model, "--batches", "1", "4", "--rounds", "1"]
    done = python(str(MODULES / "inference.py"), *words, env=clean_env(OMP_NUM_THREADS="1"))
    assert done.code == 0 and "DataParallel is a pass-through here: with no GPU(s)" in done.output, done.output
    assert re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +[\d.]+×$", done.output, re.M) == ["1", "4"]
    verdict = runpy.run_path(str(MODULES / "inference.py"))["verdict"]
    assert verdict(4, {8: 0.5, 512: 1.5}) == "DataParallel over 4 GPUs pays from a batch of 512 on, at best 1.50×."
    assert "is not faster than one" in verdict(2, {8: 0.5}) and "pass-through" in verdict(1, {8: 0.5})


@pytest.mark.parametrize("kind", ["ours", "lightning"])
def test_lightnings_four_lines_and_ours_train_the_same_network(kind: str, tmp_path: Path) -> None:
    words = [str(MODULES / "lightning_four.py"), kind]
    if kind == "ours":
        with running([words] * 2, cwd=tmp_path) as started:
            done = started.wait(240)
    else:
        if find_spec("lightning") is None:
            pytest.skip("Lightning is not installed: pip install -e '.[peers]'")
        torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = run([*torchrun, *words], clean_env(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1"), cwd=tmp_path)
    accuracy = re.findall(r"^accuracy (\S+)$", done.output, re.MULTILINE)
    assert done.code == 0 and len(accuracy) == 1 and float(accuracy[0]) > 0.6, done.output


def test_the_toy_prints_the_modules_lines_and_equals_one_process() -> None:
    """Every form of model parallel runs with data parallel. The command fails if one differs."""
    done = _program(4, "toy.py")
    assert done.code == 0, done.output
    for rank in range(4):
        assert done.output.count(f"Running basic DDP example on rank {rank}.") == 1
        assert done.output.count(f"Running DDP with model parallel example on rank {rank}.") == 1
    assert "both halves on one cpu device" in done.output
    difference = re.search(r"mesh of 2 \(data\) × 2 \(tensor\): differs from one process by at most (\S+)", done.output)
    assert difference is not None and float(difference[1].rstrip(".,")) < 1e-9, done.output
    done = _program(1, "toy.py", "--tensor", "2")
    assert done.code == 2 and "must divide 1 ranks" in done.output, done.output
