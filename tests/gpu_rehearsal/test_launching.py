"""Under the real launcher, every process from a shell: as many ranks as there are GPUs, and the run is named where one dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu_rehearsal.conftest import OnCpu
from tests.gpu_rehearsal.rehearsal import RANK, differing, preload, saved, settings
from tests.processes import PYTHON, clean_env, run


def _env(tmp_path: Path, **extra: str) -> dict[str, str]:
    env = clean_env(LD_PRELOAD=preload(), STANDIN_DEVICES="2", LOCKSTEP_THREADS="1", TMPDIR=str(tmp_path), **extra)
    del env["CUDA_VISIBLE_DEVICES"]
    return env


@pytest.mark.smoke
def test_a_rank_a_gpu(tmp_path: Path, data_root: Path, on_cpu: OnCpu) -> None:
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root)]
    done = run([PYTHON, "-m", "lockstep.training", "launch", "--", PYTHON, *RANK, *words], _env(tmp_path), 150)
    assert done.code == 0, done.output
    assert "2 ranks on cuda" in done.output
    assert differing(saved(tmp_path / "run"), on_cpu()) == []


def test_a_rank_that_dies_ends_the_job_with_its_name(tmp_path: Path, data_root: Path) -> None:
    """As on Kubernetes, where the manifest sets how torch handles NCCL's errors."""
    changes = {"model": "tests.nets:DyingPlain", "collective_timeout": 5, "evaluate__every": 100}
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), *settings(data_root, **changes)]
    env = _env(tmp_path, LOCKSTEP_TEST_FATE="1:3:KILL", TORCH_NCCL_ASYNC_ERROR_HANDLING="1")
    launch = ["launch", "--max-restarts", "0", "--grace", "5"]
    done = run([PYTHON, "-m", "lockstep.training", *launch, "--", PYTHON, *RANK, *words], env, 150)
    assert done.code == 1, done.output
    assert "rank 1 did not arrive: ended by SIGKILL" in done.output
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["code"] == 1 and "rank 1 did not arrive" in status["reason"]
