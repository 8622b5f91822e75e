"""Inside a process that the doctor has started: takes its rows one after the other and writes what became of each.

A check that raises on one rank ends this process, and its launcher ends the others: they may wait for it for ever. The
doctor outside then starts new ones for the rows that are left.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lockstep.training.contract import EXIT_DONE, EXIT_FAILED, UserError
from lockstep.training.doctor.table import ROWS, Outcome, Place
from lockstep.training.models.arithmetic import float32_on_gpus
from lockstep.training.parallel.world import World, detect, joined, set_threads

COLLECTIVE_SECONDS = 50.0
"""Collectives end by themselves before the row's bound ends them."""


def main(folder: Path, names: list[str], alone: bool) -> int:
    """Runs these rows; each process appends to `folder/RANK.jsonl`. Returns 1 where a check raised.

    Args:
        alone: one process that sees all GPUs, without a process group.
    """
    checks = {check.name: check for check in ROWS}
    with _world(alone) as world:
        float32_on_gpus(tf32=False)  # as a run of ours
        earlier = read(folder, 0)
        begun_file(folder, world.rank).touch()
        for name in names:
            check, began = checks[name], time.monotonic()
            module, _, function = check.function.partition(":")
            row_folder = folder / name.replace(" ", "-")
            row_folder.mkdir(exist_ok=True)
            place = Place(world, earlier, str(row_folder))
            try:
                called = getattr(importlib.import_module(f"lockstep.training.doctor.{module}"), function)
                outcome: Outcome = called(place, check.argument) if check.argument else called(place)
            except Exception as error:  # noqa: BLE001 - any error becomes this row's outcome
                lines = str(error).strip().splitlines()
                message = (
                    str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {(lines or [''])[0]}"
                )
                _write(folder, world.rank, name, Outcome("failed", message[:300], facts={"raised": True}))
                os._exit(EXIT_FAILED)  # NCCL may wait for others, who do not come
            earlier[name] = outcome
            _write(folder, world.rank, name, replace(outcome, seconds=time.monotonic() - began))
    return EXIT_DONE


@contextlib.contextmanager
def _world(alone: bool) -> Iterator[World]:
    if alone:
        yield World(device=torch.device("cuda", 0))
        return
    world = detect(os.environ)
    set_threads(world, 0, os.environ)
    with joined(world, "cuda", COLLECTIVE_SECONDS) as connected:
        yield connected


def _write(folder: Path, rank: int, name: str, outcome: Outcome) -> None:
    with (folder / f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"name": name, **asdict(outcome)}) + "\n")


def begun_file(folder: Path, rank: int) -> Path:
    """Is there when this rank has joined the others."""
    return folder / f"{rank}.begun"


def read(folder: Path, rank: int) -> dict[str, Outcome]:
    """What this rank has written so far, by row."""
    path = folder / f"{rank}.jsonl"
    if not path.exists():
        return {}
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]  # a line that is still being written has no end yet
    rows = [json.loads(line) for line in complete.splitlines()]
    return {row.pop("name"): Outcome(**row) for row in rows}
