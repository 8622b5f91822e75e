"""python -m lockstep.training report RUN [RUN …] [--out FILE].

Makes one HTML file of one or several runs: curves, where the time went, restarts and checkpoints, config, environment, final
numbers. The file holds all it needs, its charting library too, and asks no network for anything.

    record.py         reads a run directory.
    charts.py         the lines of each chart.
    template.html.j2  the page.
    assets/           its style and its script, and Chart.js with its licence.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ... import contract, files
from ...config import settings
from ...contract import UserError
from ...limits import SILENT_RUN_SECONDS
from . import charts, record
from .charts import Table, TableRow
from .record import RunRecord, number_of

FOLDER = Path(__file__).parent
MARK = '<meta name="generator" content="lockstep report">'
"""The mark near the beginning of every report. `write` replaces no file without this mark."""
_ENVIRONMENT = ("versions", "world", "threads", "git_revision", "global_batch_size", "data", "environment")
"""Parts of run.yaml."""


def write(runs: Sequence[Path], out: Path) -> None:
    """Writes the report of some run directories.

    Raises:
        UserError: a directory holds no run, or `out` is not a report or cannot be written.
    """
    if os.path.lexists(out) and not _is_report(out):
        raise UserError(f"{out} exists and is not a report: choose another --out")
    text = page([record.read(path) for path in runs])
    try:
        files.publish(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def _is_report(out: Path) -> bool:
    try:
        with files.regular(out) as file:
            return MARK.encode() in file.read(4096)
    except OSError:
        return False


def page(runs: Sequence[RunRecord]) -> str:
    """Returns the whole file as HTML."""
    names = _distinct(runs)
    return _environment().get_template("template.html.j2").render(
        mark=MARK,
        names=names,
        verdicts=[(name, *_verdict(run)) for run, name in zip(runs, names)],
        charts=charts.of(runs, names),
        final=_compared([_final(run.summary) for run in runs], names, mark=False),
        about={
            "Config": _compared([settings.dotted(run.part("config")) for run in runs], names),
            "Environment": _compared(
                [settings.dotted({part: run.about.get(part) for part in _ENVIRONMENT}) for run in runs], names
            ),
        },
        version=contract.VERSION,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        asset=lambda name: (FOLDER / "assets" / name).read_text(encoding="utf-8"),
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    """Returns the templates' environment, with autoescape: names, reasons and settings are plain text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def _distinct(runs: Sequence[RunRecord]) -> list[str]:
    """Returns distinct names of the runs: with the parent folder if two names are equal, and with a number if that does not help."""
    names = [run.path.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.path.parent.name}/{run.path.name}" for run in runs]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _verdict(run: RunRecord) -> tuple[str, str]:
    """Returns how a run ended, and its description."""
    code, reason = number_of(run.status.get("code")), run.status.get("reason", "")
    gone = code is None and _gone(run.path)
    if gone:
        reason = "no process of this machine holds the run any more, and none has recorded how it ended"
    ending = (
        ("gone" if gone else "running")
        if code is None
        else {0: "complete", 2: "wrong usage", 75: "preempted"}.get(int(code), "failed")
    )
    why = f": {reason}" if reason and reason not in (ending, "complete", "running") else ""
    began = f"{datetime.fromtimestamp(run.began, timezone.utc):%Y-%m-%d %H:%M} UTC, " if run.began else ""
    size, recipe = run.part("world").get("size", "?"), run.part("config").get("recipe")  # a user's own loop has none
    return ending + why, f"{began}{f'{recipe} ' if recipe else ''}on {size} rank{'' if size == 1 else 's'}"


def _gone(path: Path) -> bool:
    """Returns whether a run without an end has no process: rank 0 holds a lock, and writes its status every few seconds."""
    with contextlib.suppress(OSError):
        silent = time.time() - (path / contract.STATUS_FILE).stat().st_mtime
        return silent > SILENT_RUN_SECONDS and files.is_locked(path / contract.LOCK_FILE) is False
    return False


def _final(summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the final numbers for people, by their names, with those of each class and of a script's loop."""
    final = {}
    for group, value in summary.items():
        if group == "goodput":
            continue  # it has a chart
        for name, number in value.items() if isinstance(value, dict) else [("", value)]:
            if number is not None:
                title = f"{group} {name}".replace("_", " ").strip()
                final[title] = f"{number:,.4f}" if isinstance(number, float) else number
    return final


def _compared(columns: list[dict[str, Any]], names: list[str], mark: bool = True) -> Table:
    """Returns the values side by side. With `mark`, rows that differ come first, and say so in words, too.

    Variables of the environment are not marked: many differ at every start.
    """
    first: list[TableRow] = []
    rest: list[TableRow] = []
    for key in dict.fromkeys(key for column in columns for key in column):
        cells = [_shown(column.get(key)) for column in columns]
        differs = mark and len(set(cells)) > 1 and not key.startswith("environment.")
        (first if differs else rest).append(TableRow(f"{key} (differs)" if differs else key, cells, differs))
    return Table(["", *names], [*first, *rest])


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "–"
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates, sets and bytes, too
        return str(value)
