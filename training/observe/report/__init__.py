"""python -m lockstep.training report RUN [RUN …] [--out FILE]

One or several runs as one HTML file: curves, where the time went, restarts and checkpoints, config, environment, final
numbers. The file holds all it needs, its charting library too, and asks no network for anything.

    record.py         what a run directory holds, read
    charts.py         the lines of each chart
    tables.py         final numbers, config and environment of the runs, side by side
    template.html.j2  the page
    assets/           its style and its script, and Chart.js with its licence
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jinja2

from lockstep.training import contract, files
from lockstep.training.contract import UserError
from lockstep.training.observe.report import charts, record, tables
from lockstep.training.observe.report.record import RunRecord, number_of

FOLDER = Path(__file__).parent
MARK = '<meta name="generator" content="lockstep report">'
"""Stands near the beginning of every report. A file without it is somebody else's, and is not replaced."""


def write(runs: Sequence[Path], out: Path) -> None:
    """Writes the report of some run directories.

    Raises:
        UserError: one of them does not hold a run, or `out` is somebody else's file or cannot be written.
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
    """The whole file."""
    names = _distinct(runs)
    return _environment().get_template("template.html.j2").render(
        mark=MARK,
        names=names,
        verdicts=[_verdict(run, name) for run, name in zip(runs, names)],
        final=tables.final(runs, names),
        charts=charts.of(runs, names),
        config=tables.config(runs, names),
        environment=tables.environment(runs, names),
        version=contract.VERSION,
        written=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        asset=lambda name: (FOLDER / "assets" / name).read_text(encoding="utf-8"),
    )  # fmt: skip


@cache
def _environment() -> jinja2.Environment:
    """Autoescape is on for every template: names, reasons and settings are text, whatever is in them."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def _distinct(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' names; with the folder before them where two have the same one, and a number where that does not help."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.path.parent.name}/{run.name}" for run in runs]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


class Verdict(NamedTuple):
    """How a run ended, and what it was."""

    name: str
    ending: str
    facts: str


def _verdict(run: RunRecord, name: str) -> Verdict:
    code, reason = number_of(run.status.get("code")), run.status.get("reason", "")
    ending = "running" if code is None else {0: "complete", 2: "wrong usage", 75: "preempted"}.get(int(code), "failed")
    why = f": {reason}" if reason and reason not in (ending, "complete", "running") else ""
    began = f"{datetime.fromtimestamp(run.began, timezone.utc):%Y-%m-%d %H:%M} UTC, " if run.began else ""
    size = run.part("world").get("size", "?")
    of = run.part("config").get("recipe")  # a user's own loop has none
    facts = f"{f'{of} ' if of else ''}on {size} rank{'' if size == 1 else 's'}"
    return Verdict(name, ending + why, began + facts)
