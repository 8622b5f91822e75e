"""A service, or the disk below TensorBoard's files, that no longer answers: the training goes on, and ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import PYTHON, ROOT, clean_env

FAKE = """
import time
class Settings:
    def __init__(self, **words): pass
class Run:
    def define_metric(self, *words, **more): pass
    def log(self, values):
        time.sleep({log})
    def finish(self):
        time.sleep({finish})
def init(**words):
    return Run()
"""
FOR_EVER = 100_000


@pytest.mark.parametrize(("log", "finish"), [(FOR_EVER, 0), (0, FOR_EVER)])
def test_a_service_that_hangs_holds_up_neither_a_step_nor_the_end(
    tiny: list[str], tmp_path: Path, log: float, finish: float
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/wandb.py").write_text(FAKE.format(log=log, finish=finish))
    env = clean_env()
    env["PYTHONPATH"] = f"{tmp_path / 'fake'}{os.pathsep}{env.get('PYTHONPATH', ROOT)}"
    words = [PYTHON, "-m", "lockstep.training", "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny,
             "log.wandb=x", "preempt.grace_seconds=2"]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert done.returncode == 0, done
    assert done.stderr.count("wandb has not taken everything within 2 s") == 1, done
    assert len(events(tmp_path / "run", "epoch")) == 3 and (tmp_path / "run/summary.json").exists()
