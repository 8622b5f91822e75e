"""lockstep report RUN …: one HTML file of one or several runs. Imports no torch.

It has curves, the time of the job, final numbers and settings. The page has no script, and asks no network for anything.
A run's files may be missing, cut off or damaged, and may hold anything: the reader uses the readable part.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.training import contract, files
from lockstep.training.cli import run_dir
from lockstep.training.config import settings
from lockstep.training.contract import EXIT_DONE, REPORT_FILE, VERSION, UserError, printable
from lockstep.training.observe.account import of_run
from lockstep.wire.status import goodput_line

from . import parser

MARK = '<meta name="generator" content="lockstep report">'
"""The mark near the beginning of every report. `write` replaces no file without this mark."""
_EVENT_BYTES, _EVENT_LINES, _LINE_BYTES = 128 << 20, 1_500_000, 1 << 16
"""Most bytes and lines to read of events.jsonl, and most bytes of a line. Later lines are ignored."""
_NAMES = 40
"""Most curves."""
_POINTS = 400
"""Most points of a curve."""
_WIDTH, _HEIGHT = 640, 220
"""Size of a chart without its labels, in SVG units."""
_OF_EPOCHS = ("test_loss", "accuracy", "images_per_second")
"""Names of numbers in the events `epoch` and `score`."""
_COLOURS = ("#0b76d1", "#d1570b", "#1f9148", "#9b3fc4", "#a07800", "#c4265e")
_DASHES = ("", "9 4", "3 3", "12 3 3 3", "6 2", "2 5")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, td, th { overflow-wrap: anywhere; } svg { width: 100%; } svg text { font-size: 12px; fill: currentColor; }
svg path, polyline { fill: none; stroke-width: 2; stroke-linecap: round; }
div { overflow-x: auto; } table { border-collapse: collapse; }
td, th { text-align: left; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8884; font-weight: normal; }
"""
Curve = dict[float, float]
"""Step → value. A step that a later attempt has taken again has the later value."""
Table = dict[str, list[str]]
"""Name of a row → its cells."""


def main(argv: list[str]) -> int:
    """Writes the page. Raises `UserError` for wrong arguments, and for a directory without a run."""
    parsed = parser("report")
    parsed.add_argument("runs", type=run_dir, metavar="RUN", nargs="+", help="a run directory; several are compared")
    parsed.add_argument("--out", type=Path, help=f"default: RUN/{REPORT_FILE}; {REPORT_FILE} here for several runs")
    args = parsed.parse_args(argv)
    out = args.out or (args.runs[0] / REPORT_FILE if len(args.runs) == 1 else Path(REPORT_FILE))
    write(args.runs, out)
    print(printable(str(out)))
    return EXIT_DONE


def write(runs: Sequence[Path], out: Path) -> None:
    """Writes the report of some run directories.

    Raises:
        UserError: a directory holds no run, or `out` is not a report or cannot be written.
    """
    if os.path.lexists(out) and not _is_report(out):
        raise UserError(f"{out} exists and is not a report: choose another --out")
    text = page(runs)
    try:
        files.publish(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def _is_report(out: Path) -> bool:
    with contextlib.suppress(OSError), files.regular(out) as file:
        return MARK.encode() in file.read(4096)
    return False


def page(runs: Sequence[Path]) -> str:
    """Returns the page. Raises `UserError` for a directory without a run."""
    names = [str(run) for run in runs]
    about = [settings.read_yaml(run / contract.RUN_FILE) for run in runs]
    status, summary = (
        [_mapping(files.read_json(run / name)) for run in runs]
        for name in (contract.STATUS_FILE, contract.SUMMARY_FILE)
    )
    accounts = [of_run(run) for run in runs]
    ends = {name: [_ending(value), goodput_line(account.shares())]
            for name, value, account in zip(names, status, accounts)}  # fmt: skip
    seconds = [{category.value: f"{value:.1f}" for category, value in account.seconds.items() if value >= 0.05}
               for account in accounts]  # fmt: skip
    final = [{name: value for name, value in one.items() if name != "goodput"} for one in summary]
    config = [_mapping(one.pop("config", None)) for one in about]
    sections = {
        "Runs": _table(["", "end", "time"], ends),
        **{name: _chart(curves, names) for name, curves in _curves(runs).items()},
        "Time of the job, seconds": _table(["", *names], _beside(seconds)),
        "Final numbers": _table(["", *names], _beside(final)),
        "Config": _table(["", *names], _beside(config, mark=True)),
        "Environment": _table(["", *names], _beside(about, mark=True)),
    }
    title = html.escape(", ".join(names))
    return "\n".join([
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{MARK}',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'">',
        f"<title>Lockstep report: {title}</title><style>{_STYLE}</style></head><body>\n<h1>{title}</h1>",
        *(f"<h2>{html.escape(name)}</h2>\n<div>{content}</div>" for name, content in sections.items()),
        f"<p>Lockstep {VERSION}</p></body></html>\n",
    ])  # fmt: skip


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ending(status: dict[str, Any]) -> str:
    """Returns how a run ended, from its status.json."""
    code, reason = status.get("code"), status.get("reason")
    if type(code) is not int:
        return "no end is recorded: it runs, or was killed"
    return f"{ {0: 'complete', 2: 'wrong usage', 75: 'preempted'}.get(code, 'failed') }: {reason}"


def _curves(runs: Sequence[Path]) -> dict[str, list[Curve]]:
    """Returns the name of each number → its curve in each run."""
    curves: dict[str, list[Curve]] = defaultdict(lambda: [{} for _ in runs])
    for place, run in enumerate(runs):
        for event in _events(run / contract.EVENTS_FILE):
            kind, step = event.get("event"), _finite(event.get("step"))
            values = {
                "step": {name: value for name, value in event.items() if name.startswith("train_")},
                "log": _mapping(event.get("values")),
            }.get(str(kind), {name: event.get(name) for name in _OF_EPOCHS} if kind in ("epoch", "score") else {})
            for name, number in values.items():
                value = _finite(number)
                if step is not None and value is not None and (name in curves or len(curves) < _NAMES):
                    curves[name][place][step] = value
    return curves


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the readable lines of the file."""
    with contextlib.suppress(OSError), files.regular(path) as file:
        for line in itertools.islice(iter(lambda: file.readline(_LINE_BYTES), b""), _EVENT_LINES):
            if file.tell() > _EVENT_BYTES:
                return
            if line.startswith(b"{") and b'"event"' in line:
                with contextlib.suppress(ValueError):  # cut off by a kill
                    yield _mapping(files.parsed(line))


def _finite(value: Any) -> float | None:
    """Returns the value as a number that a chart can show; None: it is none."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100  # nor NaN
    return float(value) if known else None


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns about `_POINTS` of the points, in their order: the first, the last, the lowest and the highest of each stretch."""
    length = math.ceil(len(points) / (_POINTS / 2 - 1))
    if length < 2:
        return points
    stretches = (sorted(points[at : at + length], key=lambda point: point[1]) for at in range(0, len(points), length))
    return sorted({points[0], points[-1], *(end for stretch in stretches for end in (stretch[0], stretch[-1]))})


def _chart(curves: list[Curve], names: Sequence[str]) -> str:
    """Returns a chart as SVG, of one or more curves. The scale is logarithmic if the largest value is far above the others."""
    values = sorted(value for curve in curves for value in curve.values())
    log = values[0] > 0 and values[-1] > 100 * values[len(values) // 2]
    height = math.log10 if log else float
    low, high, last = height(values[0]), height(values[-1]), max(max(curve, default=0.0) for curve in curves)
    drawn = []
    for number, (curve, name) in enumerate(zip(curves, names)):
        points = thinned([(step, height(value)) for step, value in sorted(curve.items())])
        at = " ".join(
            f"{70 + _WIDTH * step / (last or 1.0):.1f},{10 + _HEIGHT * (high - value) / ((high - low) or 1.0):.1f}"
            for step, value in points + points[-1:]  # a line of one value is a dot
        )
        line = f'stroke="{_COLOURS[number % 6]}" stroke-dasharray="{_DASHES[number // 6 % 6]}"'
        below = _HEIGHT + 60 + 18 * number
        drawn += [f'<polyline points="{at}" {line}/>', f'<path d="M70 {below - 4}h30" {line}/>',
                  f'<text x="108" y="{below}">{html.escape(name)}: {len(curve)} values</text>']  # fmt: skip
    scale = " (log)" if log else ""
    texts = [(62, 20, "end", f"{values[-1]:.4g}"), (62, _HEIGHT + 10, "end", f"{values[0]:.4g}{scale}"),
             (70, _HEIGHT + 30, "start", "step 0"), (70 + _WIDTH, _HEIGHT + 30, "end", f"{last:g}")]  # fmt: skip
    labels = (f'<text x="{x}" y="{y}" text-anchor="{side}">{text}</text>' for x, y, side, text in texts)
    axes = f'<path d="M70 10v{_HEIGHT}h{_WIDTH}" stroke="currentColor"/>'
    box = f'viewBox="0 0 {_WIDTH + 80} {_HEIGHT + 60 + 18 * len(curves)}" role="img"'
    return f"<svg {box}>{axes}{''.join(labels)}{''.join(drawn)}</svg>"


def _beside(columns: list[dict[str, Any]], mark: bool = False) -> Table:
    """Returns the values of several runs side by side. With `mark`, rows that differ come first, and say so."""
    flat = [settings.dotted(column) for column in columns]
    rows = {
        str(key): [_shown(column.get(key)) for column in flat]
        for key in dict.fromkeys(key for one in flat for key in one)
    }
    differing = {f"{name} (differs)": cells for name, cells in rows.items() if mark and len({*cells}) > 1}
    return {**differing, **{name: cells for name, cells in rows.items() if f"{name} (differs)" not in differing}}


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates, sets and bytes, too
        return str(value)


def _table(head: list[str], rows: Table) -> str:
    """Returns a table as HTML; its cells are plain text."""
    lines = [head, *([name, *cells] for name, cells in rows.items())]
    return f"<table>{''.join(f'<tr>{_cells(line)}</tr>' for line in lines)}</table>"


def _cells(texts: list[str]) -> str:
    return "".join(f"<td>{html.escape(text)}</td>" for text in texts)
