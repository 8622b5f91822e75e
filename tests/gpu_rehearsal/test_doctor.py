"""`lockstep doctor gpu` over the stand-in's GPUs: every row runs as it would on a machine that has some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.gpu_rehearsal.rehearsal import preload
from tests.processes import PYTHON, Result, clean_env, run


def _doctor(folder: Path, devices: int, *words: str, **extra: str) -> tuple[Result, dict[str, Any]]:
    """How it ended, and its file."""
    env = clean_env(
        LD_PRELOAD=preload(), STANDIN_DEVICES=str(devices), LOCKSTEP_THREADS="1", TMPDIR=str(folder), **extra
    )
    del env["CUDA_VISIBLE_DEVICES"]
    file = folder / "table.json"
    command = [PYTHON, "-m", "tests.gpu_rehearsal.doctor", "gpu", "--out", str(file), *words]
    done = run(command, env, 1000)
    return done, json.loads(file.read_text()) if file.exists() else {}


def _results(value: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["result"] for row in value["rows"]}


def _assert_no_rates(done: Result, value: dict[str, Any]) -> None:
    """What is computed on a CPU says nothing of a GPU's speed."""
    assert value["rehearsal"] is True and "rehearsal: these GPUs are a stand-in" in done.output
    assert all(not {"rates", "seconds"} & set(row) for row in value["rows"]) and "GB/s" not in done.output


@pytest.mark.parametrize("devices", [1, 2])
def test_the_whole_table(tmp_path: Path, devices: int) -> None:
    done, value = _doctor(tmp_path, devices, "--seconds", "1000")  # this machine may be busy
    assert done.code == 0, done.output
    _assert_no_rates(done, value)
    expected = {name: "not tried" if gpus > devices else "ok" for name, gpus in product.gpu_checks().items()} | {
        "speedrun": "not tried"
    }
    assert _results(value) == expected, done.output
    details = {row["name"]: row["detail"] for row in value["rows"]}
    assert details["recorded = eager"].startswith("the same bits")
    assert details["kill and resume"].startswith("the same bits as without the kill, after 12 steps")
    assert [name for name, detail in details.items() if detail == "one GPU"] == [
        name for name, gpus in product.gpu_checks().items() if gpus > devices
    ]
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]
    assert left == ["table.json"], "something was left"


def test_a_strategy_that_sums_nothing_fails_its_row_alone(tmp_path: Path) -> None:
    """Each rank keeps its own gradients."""
    done, value = _doctor(
        tmp_path, 2, "--only", "peer", "--only", "NCCL", "--only", "strategy",
        REHEARSAL_FAULT=product.SUM_OF_ALLREDUCE,
    )  # fmt: skip
    assert done.code == 1, done.output
    _assert_no_rates(done, value)
    chosen = [name for name in product.gpu_checks() if name.startswith(("visible", "peer", "NCCL", "strategy"))]
    assert _results(value) == {name: "failed" if name == "strategy allreduce" else "ok" for name in chosen}, done.output
    (failed,) = (row for row in value["rows"] if row["result"] == "failed")
    assert "from one process after 6 steps on 2 GPUs" in failed["detail"] and "sync.name=flat" in failed["advice"]
    assert f"→ {failed['advice']}" in done.output


def test_gpus_whose_first_process_does_not_start_are_known_all_the_same(tmp_path: Path) -> None:
    """Their names are asked for in another one."""
    done, value = _doctor(tmp_path, 2, "--only", "peer", REHEARSAL_FAULT="no.such:module")
    assert done.code == 1, done.output
    assert _results(value) == {"visible": "failed", "peer access": "not tried"}
    _assert_no_rates(done, value)


def test_with_one_gpu_the_rows_of_two_say_so(tmp_path: Path) -> None:
    done, value = _doctor(tmp_path, 1, "--only", "peer", "--only", "strategy f", "--only", "a hang")
    assert done.code == 0, done.output
    assert _results(value) == {
        "visible": "ok", "peer access": "not tried", "strategy flat": "not tried", "strategy fsdp": "not tried",
        "a hang is named": "not tried",
    }  # fmt: skip
    assert all(row["detail"] == "one GPU" for row in value["rows"] if row["result"] == "not tried")
