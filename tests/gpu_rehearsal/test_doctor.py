"""`lockstep doctor gpu` over the stand-in's GPUs: every row runs as it would on a machine that has some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.gpu_rehearsal.rehearsal import environment
from tests.processes import PYTHON, run


def _doctor(folder: Path, devices: int, *only: str, **extra: str) -> tuple[int, dict[str, Any]]:
    """Returns its exit code and its output."""
    result = run(
        [PYTHON, "-m", "tests.gpu_rehearsal.doctor", *only], environment(devices, TMPDIR=str(folder), **extra), 1000
    )
    value: dict[str, Any] = json.loads(result.output[result.output.index("{\n") :])
    assert not [path for path in folder.iterdir() if "torchinductor" not in path.name], "something was left"
    return result.code, value


def _results(value: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["result"] for row in value["rows"]}


@pytest.mark.parametrize("devices", [1, 2])
def test_the_whole_table(tmp_path: Path, devices: int) -> None:
    code, value = _doctor(tmp_path, devices)
    assert code == 0 and value["gpus"] == devices, value
    expected = {name: "not tried" if gpus > devices else "ok" for name, gpus in product.gpu_checks().items()}
    assert _results(value) == expected, value
    assert all(row["detail"] == "one GPU" for row in value["rows"] if row["result"] == "not tried")


def test_a_strategy_that_sums_nothing_fails_its_row_alone(tmp_path: Path) -> None:
    """Each rank keeps the gradients that it computed."""
    only = ("NCCL", "strategy exact", "strategy flat")
    code, value = _doctor(tmp_path, 2, *only, REHEARSAL_FAULT=product.SUM_OF_EXACT)
    assert code == 1
    assert _results(value) == {
        "visible": "ok", "NCCL all-reduce": "ok", "strategy exact": "failed", "strategy flat": "ok",
    }  # fmt: skip
    (failed,) = (row for row in value["rows"] if row["result"] == "failed")
    assert "from one process after 6 steps on 2 GPUs" in failed["detail"] and "sync.name=flat" in failed["advice"]
