"""What a large job leaves outside: a run directory with the textfiles of many ranks and a long events.jsonl, and the folders of many
local jobs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml

from lockstep.jobs import records
from lockstep.jobs.local.supervise import here
from lockstep.jobs.spec.model import JobSpec
from lockstep.training import config as configuration
from lockstep.training import contract
from lockstep.training.observe.metrics import Metrics

BEGAN = 1_700_000_000.0
SPIKE = 0.377
"""Where in the run, as a share of its steps, one reading of the loss is far above the others."""


def metrics_text(rank: int, run: str, slow: bool = False) -> str:
    """What a rank serves after 100 steps. A slow one waits for nobody."""
    metrics = Metrics(run, rank, torch.device("cpu"))
    metrics.describe("smoke", "flat", 1024, contract.VERSION, 1, 0, 1_000_000, 0)
    waits = 0.001 if slow else 0.05
    times = {"step_duration": 0.1, "data_wait": 0.001, "grad_ready": 0.098 - waits, "sync_wait": waits}
    for step in range(1, 101):
        metrics.step([times], step, 0.1, 64, step * 1_000_000)
    metrics.reading(1.25, 0.5)
    return metrics.text().decode()


def run_directory(path: Path, ranks: int, events: int, every: int = 10, slow: int | None = None) -> Path:
    """A run of `events` readings, one every `every` steps, on `ranks` ranks."""
    (path / contract.METRICS).mkdir(parents=True)
    about = {"config": configuration.to_dict(configuration.load("smoke")), "global_batch_size": 128, "data": {"name": "digits"},
             "world": {"size": ranks}}  # fmt: skip
    (path / contract.RUN_FILE).write_text(yaml.safe_dump(about))
    (path / contract.STATUS_FILE).write_text(
        json.dumps({"code": 0, "reason": "complete", "step": events * every, "attempt": 1})
    )
    template = metrics_text(0, path.name)
    for rank in range(ranks):
        text = metrics_text(rank, path.name, True) if rank == slow else template.replace('rank="0"', f'rank="{rank}"')
        contract.textfile(path, rank).write_text(text)
    with (path / contract.EVENTS_FILE).open("w") as file:
        for event in _events(events, every):
            file.write(json.dumps(event) + "\n")
    return path


def _events(count: int, every: int) -> Any:
    yield {"event": "start", "time": BEGAN, "attempt": 1, "world_size": 8, "step": 0, "config_hash": "0" * 64}
    an_epoch = max(count // 100, 1)
    for number in range(1, count + 1):
        now, step = BEGAN + number, number * every
        loss = 9.0 if number == int(SPIKE * count) else 2.0 * math.exp(-number / count * 3) + 0.01 * math.sin(number)
        yield {
            "event": "step", "time": now, "attempt": 1, "step": step, "lr": 0.1, "train_loss": loss, "grad_norm": 1.0,
            "step_duration": 0.1, "data_wait": 0.001, "grad_ready": 0.049, "sync_wait": 0.05,
        }  # fmt: skip
        if number % an_epoch == 0:
            epoch = number // an_epoch
            yield {"event": "epoch", "time": now, "attempt": 1, "epoch": epoch, "step": step, "trained_seconds": number / 1.0,
                   "train_loss": loss, "test_loss": loss, "accuracy": epoch / 101, "examples_seen": step * 128}  # fmt: skip
            yield {"event": "checkpoint_written", "time": now, "attempt": 1, "path": f"step-{step:08d}", "seconds": 0.1}


def local_jobs(home: Path, count: int) -> None:
    """Folders of `count` local jobs that have ended, below LOCKSTEP_HOME."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    (home / "local").mkdir(mode=0o700)
    for number in range(count):
        name = f"job-{number}"
        folder = home / "local" / name
        folder.mkdir(mode=0o700)
        spec = JobSpec(name=name, recipe="smoke")
        job = records.identity(name)
        record = {
            "spec": spec.record(), "hash": spec.hash(), "run_dir": str(home / name), "command": ["true"], "env": {},
            "time_limit": 3600.0, "grace": 60.0, "created": "2026-11-23T08:00:00+00:00", "job": job, "host": here(),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(record))
        (folder / "ended.json").write_text(
            json.dumps({"code": 0, "reason": "complete", "timed_out": False, "job": job})
        )
        (folder / "log.txt").write_text("")
