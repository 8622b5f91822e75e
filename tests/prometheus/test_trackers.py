"""TensorBoard and W&B get what events.jsonl holds; neither can end a run, or hold it up."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events import events
from tests.processes import PYTHON, ROOT, clean_env
from tests.ranks import training

NAMES = {"elapsed", "train_loss", "val_acc", "epoch", "examples_seen"}

pytestmark = pytest.mark.promise("trackers")


def _needs(module: str) -> None:
    if os.environ.get("CI"):
        __import__(module)
    pytest.importorskip(module)


def test_tensorboard_has_the_numbers_of_the_events(tiny: list[str], tmp_path: Path) -> None:
    _needs("tensorboard")
    words = ("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "log.tensorboard=true", "log.every=4")
    result = training(*words, "epochs=2")
    assert result.code == 0, result.output
    result = training(*words, "epochs=3")
    assert result.code == 0, result.output
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert set(accumulator.Tags()["scalars"]) >= NAMES | {"lr", "grad_norm", "images_per_second", "sync_wait"}
    epochs = events(tmp_path / "run", "epoch")
    for name, key in (("val_acc", "accuracy"), ("elapsed", "trained_seconds"), ("examples_seen", "examples_seen")):
        logged = [(scalar.step, scalar.value) for scalar in accumulator.Scalars(name)]
        assert logged == [(event["step"], pytest.approx(event[key], rel=1e-6)) for event in epochs]


def _wandb_log(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after W&B's seven bytes, in blocks of 32 KiB."""
    assert content[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:  # no room for a head: filled up
            at += room
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts, at = parts + content[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_offline(tiny: list[str], tmp_path: Path) -> None:
    _needs("wandb")
    words = ["run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "log.wandb=tests", "log.every=4"]
    result = training(*words, env=clean_env(WANDB_MODE="offline", HOME=str(tmp_path)))
    assert result.code == 0 and "warning" not in result.output, result.output
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    from wandb.proto import wandb_internal_pb2

    records = [wandb_internal_pb2.Record.FromString(data) for data in _wandb_log(file.read_bytes())]
    rows = [
        {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        for record in records if record.WhichOneof("record_type") == "history"
    ]  # fmt: skip
    epochs = events(tmp_path / "run", "epoch")
    of_step: dict[int, dict[str, float]] = {}
    for row in rows:
        of_step.setdefault(row["step"], {}).update(row)
    logged = [row for row in of_step.values() if "val_acc" in row]
    assert all(set(row) >= NAMES for row in logged) and len(epochs) == 3
    for name, key in (("val_acc", "accuracy"), ("elapsed", "trained_seconds"), ("examples_seen", "examples_seen"),
                      ("train_loss", "train_loss"), ("epoch", "epoch"), ("step", "step")):  # fmt: skip
        assert [row[name] for row in logged] == [pytest.approx(event[key], rel=1e-6) for event in epochs], name
    steps = events(tmp_path / "run", "step")
    assert [row["step"] for row in rows if "sync_wait" in row] == [event["step"] for event in steps]
    identity = json.loads((tmp_path / "run/wandb.json").read_text())["id"]
    assert identity in file.name


def test_a_service_that_fails_costs_one_line(tiny: list[str], tmp_path: Path) -> None:
    _needs("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("in the way")
    result = training("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "log.tensorboard=true")
    assert result.code == 0 and result.output.count("tensorboard is off") == 1, result.output


def test_a_tracker_that_is_not_installed_is_reported_before_the_training(tiny: list[str], tmp_path: Path) -> None:
    shadow = tmp_path / "shadow/wandb"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ModuleNotFoundError('not here', name='wandb')")
    env = clean_env()
    env["PYTHONPATH"] = f"{shadow.parent}{os.pathsep}{env['PYTHONPATH']}"
    result = training("run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny, "log.wandb=x", env=env)
    assert (
        result.code == 2
        and "pip install 'lockstep-torch[wandb]'" in result.output
        and result.output.count("error:") == 1
    ), result.output


HANGING = """
import time
class Settings:
    def __init__(self, **words): pass
class Run:
    def define_metric(self, *words, **more): pass
    def log(self, values): time.sleep(100_000)
    def finish(self): pass
def init(**words):
    return Run()
"""


def test_a_service_that_hangs_holds_up_neither_a_step_nor_the_end(tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/wandb.py").write_text(HANGING)
    words = [PYTHON, "-m", "lockstep.training", "run", "smoke", "--run-dir", str(tmp_path / "run"), "--set", *tiny,
             "log.wandb=x", "preempt.grace_seconds=2"]  # fmt: skip
    env = {**clean_env(), "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{ROOT}"}
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert result.returncode == 0, result
    assert result.stderr.count("wandb has not taken everything within 2 s") == 1, result
    assert len(events(tmp_path / "run", "epoch")) == 3 and (tmp_path / "run/summary.json").exists()
