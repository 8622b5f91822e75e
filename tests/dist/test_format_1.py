"""Runs that an earlier version began and left with checkpoints of format 1 go on, and end in the same weights.

tests/data/format-1/STRATEGY holds what such a run left behind in epoch 3 of 3 (`run.yaml`, one checkpoint of 2 ranks),
and the weights and the average that the version that wrote it came to from there (`end.safetensors`). They were made by
the code of revision 638a806, with the settings below, and are never made anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import ROOT
from tests.runs import FINAL, Job, assert_same, tensors
from training.checkpoint import store

KEPT = ROOT / "tests/data/format-1"
SETTINGS: dict[str, object] = {
    "model_options": "{width: 4}", "checkpoint.every_steps": 0, "checkpoint.keep": 1, "checkpoint.keep_best": "false",
    "optim.momentum": 0.9, "log.report": "false", "evaluate.every": 3,
}  # fmt: skip


def _left(strategy: str, run_dir: Path, data_root: Path, ranks: int = 2) -> Job:
    """The job as that version left it."""
    shutil.copytree(KEPT / strategy, run_dir, ignore=shutil.ignore_patterns("end.safetensors"))
    return Job(run_dir, data_root, ranks, **{"sync.name": strategy, **SETTINGS})


def _format(job: Job) -> int:
    newest = store.candidates(job.run_dir / "checkpoints")[0]
    return int(json.loads((newest / store.MANIFEST).read_bytes())["format"])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_a_run_of_format_1_goes_on_to_the_same_weights(strategy: str, tmp_path: Path, data_root: Path) -> None:
    """As that version went on, but for what another CPU rounds otherwise; and through a checkpoint of today, bit for bit."""
    job = _left(strategy, tmp_path / "run", data_root)
    assert _format(job) == 1
    done = job.go()
    assert done.code == 0 and "Resuming at step 2" in done.output, done.output
    shared = store.load(job.run_dir / "checkpoints" / f"step-{FINAL:08d}")["shared"]
    found = {f"{part}/{name}": tensor for part in ("model", "average") for name, tensor in shared[part].items()}
    expected = load_file(KEPT / strategy / "end.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )

    again = _left(strategy, tmp_path / "again", data_root)
    assert again.go(LOCKSTEP_TEST_FATE="0:2:TERM").code == 75
    assert _format(again) == store.FORMAT
    assert again.go().code == 0
    assert_same(again.run_dir, tensors(job.run_dir))


def test_a_run_of_format_1_goes_on_at_another_world_size(tmp_path: Path, data_root: Path) -> None:
    job = _left("zero1", tmp_path / "run", data_root, 3)
    done = job.go()
    assert done.code == 0 and "3 ranks on cpu" in done.output and "Resuming at step 2" in done.output, done.output
    assert job.steps() == [FINAL]
