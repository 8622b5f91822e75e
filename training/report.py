"""python -m training report RUN [RUN …] [--out FILE]

One or several runs as one HTML file: curves, where the time went, restarts and checkpoints, config, environment, final
numbers. The file holds all it needs, its charting library too, and asks no network for anything.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from training import contract, files, runfiles
from training.contract import UserError
from training.runfiles import RunFiles, number_of

ASSETS = Path(__file__).parent / "assets"
MARK = '<meta name="generator" content="lockstep report">'
_POINTS = 400
"""Most points of a curve, and rows of its table."""
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
_MOMENTS = {
    "start": "start", "resumed": "resumed", "checkpoint_written": "checkpoint", "checkpoint_failed": "checkpoint failed",
    "preempted": "preempted", "nonfinite": "NaN or infinite", "corrupt_checkpoint": "corrupt checkpoint", "done": "done",
}  # fmt: skip

_KEY = "▲ start or restart · ■ checkpoint · ◆ preempted · ✕ failed or corrupt · ✱ NaN or infinite · ● done"

_ANEW = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
         "SLURM_RESTART_COUNT", contract.ENV_RESTARTS, contract.ENV_METRICS_PORT)  # fmt: skip
"""Variables that are other ones at every start."""
Rows = list[list[Any]]


def write(runs: Sequence[Path], out: Path) -> None:
    """Writes the report of some run directories.

    Raises:
        UserError: one of them holds no run, or `out` is somebody else's file or cannot be written.
    """
    if os.path.lexists(out) and not _ours(out):
        raise UserError(f"{out} exists and is no report: choose another --out")
    text = page([runfiles.read(path) for path in runs])
    try:
        files.publish(out, text.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def _ours(out: Path) -> bool:
    try:
        with files.regular(out) as file:
            return MARK.encode() in file.read(4096)
    except OSError:
        return False


def page(runs: Sequence[RunFiles]) -> str:
    """The whole file."""
    names = _distinct(runs)
    halves = [*_curves(runs, names), *_by_rank(runs, names)]
    charts = [chart for chart in halves if any(line["points"] for line in chart["lines"])]
    if len(charts) % 2:
        charts[-1]["wide"] = True
    timeline = _timeline(runs, names)
    if any(line["points"] for line in timeline["lines"]):
        charts.append(timeline)
    title = f"Lockstep report: {', '.join(names)}"
    body = [
        f"<header><h1>{_text(', '.join(names))}</h1>{''.join(map(_verdict, runs, names))}</header>",
        f"<main><section><h2>Final numbers</h2>{_final(runs, names)}</section>",
        *(_figure(number, chart) for number, chart in enumerate(charts)),
        f"<section><h2>Config</h2>{_settings(runs, names)}</section>",
        f"<section><h2>Environment</h2>{_environment(runs, names)}</section></main>",
        f"<footer>Lockstep {contract.VERSION}, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC. "
        f"Charts: Chart.js (MIT).</footer><!--\n{_asset('chart.LICENSE.md').replace('--', '- -')}-->",
    ]  # fmt: skip
    # `<` in data would end the script element, or begin a comment in it.
    data = json.dumps([_drawn(chart) for chart in charts], ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{MARK}'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title><style>{_asset("report.css")}</style></head><body>'
        f'{"".join(body)}<script type="application/json" id="charts">{data}</script>'
        f"<script>{_asset('chart.umd.min.js')}</script><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _distinct(runs: Sequence[RunFiles]) -> list[str]:
    """The runs' names; with the folder before them where two have the same one, and a number where that does not help."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.path.parent.name}/{run.name}" for run in runs]
    return [f"{name} ({names[:i].count(name) + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _verdict(run: RunFiles, name: str) -> str:
    code, reason = number_of(run.status.get("code")), run.status.get("reason", "")
    said = "running" if code is None else {0: "complete", 2: "wrong usage", 75: "preempted"}.get(int(code), "failed")
    began = f"{datetime.fromtimestamp(run.began, timezone.utc):%Y-%m-%d %H:%M} UTC, " if run.began else ""
    size = run.part("world").get("size", "?")
    facts = f"{run.part('config').get('recipe', '?')} on {size} rank{'' if size == 1 else 's'}"
    more = f": {reason}" if reason and reason not in (said, "complete", "running") else ""
    return f'<p class="verdict"><strong>{_text(name)}</strong> {_text(said + more)} <span>{_text(began + facts)}</span></p>'


def _table(head: Sequence[Any], rows: Iterable[Sequence[Any]], marked: frozenset[int] = frozenset()) -> str:
    """A table whose first column names the row."""
    cells = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    lines = []
    for number, (name, *values) in enumerate(rows):
        style = ' class="differs"' if number in marked else ""
        lines.append(
            f'<tr{style}><th scope="row">{_text(name)}</th>{"".join(f"<td>{_text(v)}</td>" for v in values)}</tr>'
        )
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _final(runs: Sequence[RunFiles], names: list[str]) -> str:
    rows = []
    for key, (title, form) in _FINAL.items():
        values = [run.summary.get(key) for run in runs]
        if any(value is not None for value in values):
            rows.append([title, *(_form(value, form) for value in values)])
    if not rows:
        return "<p>No run has ended yet: no summary.json.</p>"
    return _table(["", *names], rows)


def _form(value: Any, form: str) -> str:
    if value is None:
        return "–"
    try:
        return form.format(value)
    except (ValueError, TypeError, OverflowError):
        return str(value)


def _settings(runs: Sequence[RunFiles], names: list[str]) -> str:
    return _compared([run.config for run in runs], names)


def _environment(runs: Sequence[RunFiles], names: list[str]) -> str:
    parts = ("versions", "world", "threads", "git_revision", "global_batch_size", "data", "environment")
    found = [runfiles.flat({part: run.about.get(part) for part in parts}) for run in runs]
    return _compared(found, names, frozenset(f"environment.{name}" for name in _ANEW))


def _compared(columns: list[dict[str, Any]], names: list[str], expected: frozenset[str] = frozenset()) -> str:
    """Values side by side; rows that differ come first and are marked, in words, too. Of `expected` ones nobody wonders."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    differ = [key for key in keys if key not in expected and len({repr(column.get(key)) for column in columns}) > 1]
    order = [*differ, *(key for key in keys if key not in differ)]
    rows = [
        [f"{key} (differs)" if key in differ else key, *(_value(column.get(key)) for column in columns)]
        for key in order
    ]
    return _table(["", *names], rows, frozenset(range(len(differ))))


def _value(value: Any) -> str:
    if value is None or value == "":
        return "–"
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # YAML has dates, sets and bytes, too
        return str(value)


def _chart(title: str, x: str, y: str, lines: list[dict[str, Any]], kind: str = "line", **more: Any) -> dict[str, Any]:
    return {"title": title, "x": x, "y": y, "kind": kind, "lines": lines, **more}


def _line(label: str, run: int, points: Rows, dashed: bool = False) -> dict[str, Any]:
    points = [point for point in points if all(number_of(value) is not None for value in point[:2])]
    return {"label": label, "run": run, "points": _thinned(points), "dashed": dashed}


def _thinned(points: Rows) -> Rows:
    """At most `_POINTS`, evenly chosen, the last one among them."""
    if len(points) <= _POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (_POINTS - 1))] for index in range(_POINTS)]


def _steps_per_epoch(run: RunFiles) -> float:
    for event in run.of("epoch"):
        if number_of(event.get("epoch")) and number_of(event.get("step")):
            return event["step"] / event["epoch"]
    return 0.0


def _curves(runs: Sequence[RunFiles], names: list[str]) -> list[dict[str, Any]]:
    loss, accuracy, speed = [], [], []
    for number, (run, name) in enumerate(zip(runs, names)):
        epochs, per_epoch = run.of("epoch"), _steps_per_epoch(run)
        scored = run.of("epoch", "score") if per_epoch else epochs

        def at(event: dict[str, Any], scale: float = per_epoch) -> float | None:
            """In epochs; log.score_every evaluates within them, too."""
            step = number_of(event.get("step"))
            return step / scale if step is not None and scale else number_of(event.get("epoch"))

        fine = [[at(e), e.get("train_loss")] for e in run.of("step")]
        coarse = [[e.get("epoch"), e.get("train_loss")] for e in epochs]
        loss.append(_line(f"{name}, training", number, fine if len(fine) > len(coarse) else coarse))
        loss.append(_line(f"{name}, test", number, [[at(e), e.get("test_loss")] for e in scored], dashed=True))
        accuracy.append(_line(name, number, [[at(e), e.get("accuracy")] for e in scored]))
        speed.append(_line(name, number, _speeds(epochs)))
    return [
        _chart("Loss", "epochs", "mean cross entropy", loss),
        _chart("Test accuracy", "epochs", "accuracy, 0 to 1", accuracy),
        _chart("Throughput", "epochs", "images a second, all ranks", speed, zero=True),
    ]


def _speeds(epochs: list[dict[str, Any]]) -> Rows:
    """[epoch, images/s within it]"""
    rows, seen, spent = [], 0.0, 0.0
    for event in epochs:
        images, seconds = number_of(event.get("examples_seen")), number_of(event.get("trained_seconds"))
        if images is None or seconds is None:
            continue
        if seconds > spent and images > seen:
            rows.append([event.get("epoch"), (images - seen) / (seconds - spent)])
        seen, spent = images, seconds
    return rows


def _timeline(runs: Sequence[RunFiles], names: list[str]) -> dict[str, Any]:
    lines = []
    for number, (run, name) in enumerate(zip(runs, names)):
        moments: Rows = []
        step = 0.0
        for event in run.events:
            step = number_of(event.get("step")) or step
            what = _MOMENTS.get(event["event"])
            if event["event"] == "start" and number_of(event.get("attempt")) and event["attempt"] > 1:
                what = "restart"
            if what or event["event"] in ("step", "epoch"):
                why = event.get("reason") or event.get("path") or event.get("message") or ""
                moments.append([event["time"] - run.began, step, what or "", str(why)])
        marked = [moment for moment in moments if moment[2]]
        plain = _thinned([moment for moment in moments if not moment[2]])
        points = sorted([*_thinned(marked), *plain], key=lambda moment: moment[0])
        lines.append({"label": name, "run": number, "points": points, "dashed": False})
    return _chart("Progress, checkpoints, restarts and preemptions", "seconds since the run's first start", "steps done", lines,
                  kind="timeline", zero=True, wide=True, key=_KEY)  # fmt: skip


def _by_rank(runs: Sequence[RunFiles], names: list[str]) -> list[dict[str, Any]]:
    found = []
    phases = {"data_wait": "waiting for data", "grad_ready": "forward and backward", "sync_wait": "waiting for other ranks",
              "rest": "optimizer and rest"}  # fmt: skip
    for run, name in zip(runs, names):
        lines = [
            {"label": label, "run": number, "dashed": False,
             "points": [[f"rank {int(row['rank'])}", row[phase] * 1e3] for row in run.ranks]}
            for number, (phase, label) in enumerate(phases.items())
        ]  # fmt: skip
        title = "Where a step goes, by rank" + (f": {name}" if len(runs) > 1 else "")
        found.append(_chart(title, "milliseconds a step, mean of the last attempt", "", lines, kind="stack"))
    return found


def _drawn(chart: dict[str, Any]) -> dict[str, Any]:
    lines = [line for line in chart["lines"] if line["points"]]
    return {**chart, "lines": lines, "log": chart["kind"] == "line" and _spread(lines)}


def _spread(lines: list[dict[str, Any]]) -> bool:
    """Whether the largest value is so far above the others that they would lie on the axis: that asks for a log scale."""
    values = sorted(point[1] for line in lines for point in line["points"])
    return bool(values) and values[0] > 0 and values[-1] > 100 * values[len(values) // 2]


def _figure(number: int, chart: dict[str, Any]) -> str:
    units = f"{chart['y']} over {chart['x']}" if chart["y"] else chart["x"]
    label = _text(f"{chart['title']}: {units}. The numbers are in the table beneath.")
    lines = [line for line in chart["lines"] if line["points"]]  # each has its place in the legend
    tall = f' style="--rows: {len(lines[0]["points"])}; --lines: {len(lines)}"'
    key = f"<p>{_text(chart['key'])}</p>" if "key" in chart else ""
    kind = f"{chart['kind']} wide" if chart.get("wide") else chart["kind"]
    return (
        f'<figure class="{kind}"{tall}><figcaption><h2>{_text(chart["title"])}</h2><p>{_text(units)}</p>{key}</figcaption>'
        f'<div class="canvas"><canvas id="chart-{number}" role="img" aria-label="{label}"></canvas></div>'
        f"<details><summary>Table</summary>{_numbers(chart)}</details></figure>"
    )


def _numbers(chart: dict[str, Any]) -> str:
    lines = [line for line in chart["lines"] if line["points"]]
    if chart["kind"] == "timeline":
        rows = [
            [f"{point[0]:.1f}", line["label"], point[2], f"{point[1]:.0f}", point[3]]
            for line in lines for point in line["points"] if point[2]
        ]  # fmt: skip
        return _table([chart["x"], "run", "what", "steps done", "reason or file"], rows)
    xs = list(dict.fromkeys(point[0] for line in lines for point in line["points"]))
    xs = xs if chart["kind"] == "stack" else sorted(xs)
    by = [{point[0]: point[1] for point in line["points"]} for line in lines]
    rows = [[_short(x), *(_short(values.get(x)) for values in by)] for x in _thinned(xs)]
    return _table(["" if chart["kind"] == "stack" else chart["x"], *(line["label"] for line in lines)], rows)


def _short(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
