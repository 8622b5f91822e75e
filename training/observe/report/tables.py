"""The tables of the report: final numbers, config and environment, a column for each run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.training import contract
from lockstep.training.config import settings
from lockstep.training.observe.report.record import RunRecord

_FINAL = {
    "accuracy": ("Accuracy", "{:.4f}"), "best_accuracy": ("Best accuracy", "{:.4f}"),
    "train_loss": ("Training loss", "{:.4f}"), "test_loss": ("Test loss", "{:.4f}"),
    "images_per_second": ("Images/s", "{:,.0f}"), "trained_seconds": ("Seconds of training", "{:,.1f}"),
    "wall_seconds": ("Seconds of the last attempt", "{:,.1f}"), "steps": ("Steps", "{:,}"), "epochs": ("Epochs", "{}"),
    "world_size": ("Ranks", "{}"), "sync": ("Gradient sync", "{}"), "restarts": ("Restarts", "{}"),
    "preemptions": ("Preemptions", "{}"), "checkpoint_failures": ("Failed checkpoints", "{}"),
    "config_hash": ("Config hash", "{:.12}"),
}  # fmt: skip
"""Rows of the final numbers: key of summary.json → (title, format)."""
_OTHER_AT_EVERY_START = frozenset(
    f"environment.{name}" for name in (
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
        "SLURM_RESTART_COUNT", contract.ENV_RESTARTS, contract.ENV_METRICS_PORT,
    )
)  # fmt: skip
"""Variables whose difference between two runs means nothing."""


class Row(NamedTuple):
    name: str
    cells: list[str]
    differs: bool = False
    """Marked: the runs are not alike in it."""


class Table(NamedTuple):
    head: list[str]
    rows: list[Row]


def final(runs: Sequence[RunRecord], names: list[str]) -> Table:
    """What summary.json says; no row where no run has one."""
    rows = []
    for key, (title, form) in _FINAL.items():
        values = [run.summary.get(key) for run in runs]
        if any(value is not None for value in values):
            rows.append(Row(title, [_formatted(value, form) for value in values]))
    return Table(["", *names], rows)


def _formatted(value: Any, form: str) -> str:
    if value is None:
        return "–"
    try:
        return form.format(value)
    except (ValueError, TypeError, OverflowError):
        return str(value)


def config(runs: Sequence[RunRecord], names: list[str]) -> Table:
    return _compared([run.config for run in runs], names)


def environment(runs: Sequence[RunRecord], names: list[str]) -> Table:
    parts = ("versions", "world", "threads", "git_revision", "global_batch_size", "data", "environment")
    columns = [settings.dotted({part: run.about.get(part) for part in parts}) for run in runs]
    return _compared(columns, names, _OTHER_AT_EVERY_START)


def _compared(columns: list[dict[str, Any]], names: list[str], unmarked: frozenset[str] = frozenset()) -> Table:
    """Values side by side. Rows that differ come first and are marked, in words, too; not those of `unmarked`."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    first: list[Row] = []
    rest: list[Row] = []
    for key in keys:
        values = [column.get(key) for column in columns]
        differs = key not in unmarked and len(set(map(repr, values))) > 1
        row = Row(f"{key} (differs)" if differs else key, [_shown(value) for value in values], differs)
        (first if differs else rest).append(row)
    return Table(["", *names], [*first, *rest])


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "–"
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates, sets and bytes, too
        return str(value)
