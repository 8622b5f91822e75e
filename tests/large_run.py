"""What a large job leaves outside: a run directory with the textfiles of many ranks and a long events.jsonl, and the folders of many
local jobs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from tests.product import local_record, metrics_text, smoke_settings, textfile

BEGAN = 1_700_000_000.0
SPIKE = 0.377
"""Where in the run, as a share of its steps, one reading of the loss is far above the others."""


def run_directory(path: Path, ranks: int, events: int, every: int = 10, slow: int | None = None) -> Path:
    """A run of `events` readings, one every `every` steps, on `ranks` ranks."""
    (path / "metrics").mkdir(parents=True)
    about = {"config": smoke_settings(), "global_batch_size": 128, "data": {"name": "digits"},
             "world": {"size": ranks}}  # fmt: skip
    (path / "run.yaml").write_text(yaml.safe_dump(about))
    (path / "status.json").write_text(
        json.dumps({"code": 0, "reason": "complete", "step": events * every, "attempt": 1})
    )
    template = metrics_text(0, path.name)
    for rank in range(ranks):
        text = metrics_text(rank, path.name, True) if rank == slow else template.replace('rank="0"', f'rank="{rank}"')
        textfile(path, rank).write_text(text)
    with (path / "events.jsonl").open("w") as file:
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
        record = local_record(name, home / name)
        (folder / "job.json").write_text(json.dumps(record))
        (folder / "ended.json").write_text(
            json.dumps({"code": 0, "reason": "complete", "timed_out": False, "job": record["job"]})
        )
        (folder / "log.txt").write_text("")
