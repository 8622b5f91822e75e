"""The charts of the report: the lines of each, and the same numbers as a table. `assets/report.js` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.training.observe.report.record import RunRecord, number_of
from lockstep.training.observe.report.series import thinned
from lockstep.training.observe.report.tables import Row, Table

_POINTS = 400
"""Most points of a curve, and rows of its table."""
_BARS = 32
"""Most ranks that are shown one by one. Of more, those that the others wait for."""
MOST_LOGGED = 12
"""Most charts of values that users' own loops have logged."""
_MOMENTS = {
    "start": "start", "resumed": "resumed", "checkpoint_written": "checkpoint", "checkpoint_failed": "checkpoint failed",
    "preempted": "preempted", "nonfinite": "NaN or infinite", "corrupt_checkpoint": "corrupt checkpoint", "done": "done",
}  # fmt: skip
"""Events that the timeline marks, and their names there."""
_LEGEND = "▲ start or restart · ■ checkpoint · ◆ preempted · ✕ failed or corrupt · ✱ NaN or infinite · ● done"
_PHASES = {
    "data_wait": "waiting for data", "grad_ready": "forward and backward", "sync_wait": "waiting for other ranks",
    "rest": "optimizer and rest",
}  # fmt: skip
Points = list[list[Any]]
"""[x, y] each; of the timeline [seconds, step, what happened or "", why]; of bars [name, length]."""


@dataclass(slots=True)
class Line:
    label: str
    number: int
    """Of the run, from 0: chooses mark, dash and colour. In bars: of the phase."""
    points: Points
    dashed: bool = False


@dataclass(slots=True)
class Chart:
    title: str
    x: str
    """What the x axis shows, with its unit."""
    y: str
    kind: Literal["line", "timeline", "stack"]
    lines: list[Line]
    """Those with points: each has its place in the legend."""
    from_zero: bool = False
    wide: bool = False
    """As wide as the page, not half of it."""
    legend: str = ""
    """What its marks mean."""

    def __post_init__(self) -> None:
        self.lines = [line for line in self.lines if line.points]

    @property
    def units(self) -> str:
        return f"{self.y} over {self.x}" if self.y else self.x

    @property
    def log(self) -> bool:
        """Whether the largest value is so far above the others that they would lie on the axis: asks for a log scale."""
        if self.kind != "line":
            return False
        values = sorted(point[1] for line in self.lines for point in line.points)
        return bool(values) and values[0] > 0 and values[-1] > 100 * values[len(values) // 2]

    @property
    def drawn(self) -> dict[str, Any]:
        """What `assets/report.js` reads."""
        return {
            "title": self.title, "x": self.x, "y": self.y, "kind": self.kind, "zero": self.from_zero, "log": self.log,
            "lines": [
                {"label": line.label, "run": line.number, "points": line.points, "dashed": line.dashed}
                for line in self.lines
            ],
        }  # fmt: skip

    @property
    def table(self) -> Table:
        if self.kind == "timeline":
            moments = [(line.label, point) for line in self.lines for point in line.points if point[2]]
            rows = [Row(f"{p[0]:.1f}", [label, p[2], f"{p[1]:.0f}", p[3]]) for label, p in moments]
            return Table([self.x, "run", "what", "steps done", "reason or file"], rows)
        xs = list(dict.fromkeys(point[0] for line in self.lines for point in line.points))
        xs = xs if self.kind == "stack" else sorted(xs)
        columns = [{point[0]: point[1] for point in line.points} for line in self.lines]
        rows = [Row(_short(x), [_short(column.get(x)) for column in columns]) for x in _thinned(xs)]
        return Table(["" if self.kind == "stack" else self.x, *(line.label for line in self.lines)], rows)


def of(runs: Sequence[RunRecord], names: list[str]) -> list[Chart]:
    """The charts of some runs, as they follow on the page; those that would be empty are left out."""
    halves = [chart for chart in [*_curves(runs, names), *_by_rank(runs, names)] if chart.lines]
    if len(halves) % 2:
        halves[-1].wide = True
    timeline = _timeline(runs, names)
    return [*halves, timeline] if timeline.lines else halves


def _curves(runs: Sequence[RunRecord], names: list[str]) -> list[Chart]:
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
        loss.append(_curve(f"{name}, training", number, fine if len(fine) > len(coarse) else coarse))
        loss.append(_curve(f"{name}, test", number, [[at(e), e.get("test_loss")] for e in scored], dashed=True))
        accuracy.append(_curve(name, number, [[at(e), e.get("accuracy")] for e in scored]))
        speed.append(_curve(name, number, _speeds(epochs)))
    return [
        Chart("Loss", "epochs", "mean cross entropy", "line", loss),
        Chart("Test accuracy", "epochs", "accuracy, 0 to 1", "line", accuracy),
        Chart("Throughput", "epochs", "images a second, all ranks", "line", speed, from_zero=True),
        *_logged(runs, names),
    ]


def _logged(runs: Sequence[RunRecord], names: list[str]) -> list[Chart]:
    """One chart for each name that users' own loops have logged, except names that have a chart already."""
    lines: dict[str, list[Line]] = {}
    for number, (run, name) in enumerate(zip(runs, names)):
        points: dict[str, Points] = {}
        for event in run.of("log"):
            values = event.get("values")
            for key, value in values.items() if isinstance(values, dict) else ():
                points.setdefault(str(key), []).append([event.get("step"), value])
        for key, series in points.items():
            lines.setdefault(key, []).append(_curve(name, number, series))
    shown = [key for key in lines if key not in ("accuracy", "test_loss")][:MOST_LOGGED]
    return [Chart(f"Logged: {key}", "steps", "", "line", lines[key]) for key in shown]


def _steps_per_epoch(run: RunRecord) -> float:
    for event in run.of("epoch"):
        if number_of(event.get("epoch")) and number_of(event.get("step")):
            return event["step"] / event["epoch"]
    return 0.0


def _speeds(epochs: list[dict[str, Any]]) -> Points:
    """[epoch, images/s within it]"""
    points, seen, spent = [], 0.0, 0.0
    for event in epochs:
        images, seconds = number_of(event.get("examples_seen")), number_of(event.get("trained_seconds"))
        if images is None or seconds is None:
            continue
        if seconds > spent and images > seen:
            points.append([event.get("epoch"), (images - seen) / (seconds - spent)])
        seen, spent = images, seconds
    return points


def _by_rank(runs: Sequence[RunRecord], names: list[str]) -> list[Chart]:
    charts = []
    for run, name in zip(runs, names):
        rows = sorted(run.ranks, key=lambda row: row["sync_wait"])[:_BARS] if len(run.ranks) > _BARS else run.ranks
        lines = [
            Line(label, number, [[f"rank {int(row['rank'])}", row[phase] * 1e3] for row in rows])
            for number, (phase, label) in enumerate(_PHASES.items())
        ]
        title = "Where a step goes, by rank" + (f": {name}" if len(runs) > 1 else "")
        if len(rows) < len(run.ranks):
            title += f" (the {len(rows)} of {len(run.ranks)} that wait least for others)"
        charts.append(Chart(title, "milliseconds a step, mean of the last attempt", "", "stack", lines))
    return charts


def _timeline(runs: Sequence[RunRecord], names: list[str]) -> Chart:
    lines = []
    for number, (run, name) in enumerate(zip(runs, names)):
        moments: Points = []
        step = 0.0
        for event in run.events:
            step = number_of(event.get("step")) or step
            label = _MOMENTS.get(event["event"])
            if event["event"] == "start" and number_of(event.get("attempt")) and event["attempt"] > 1:
                label = "restart"
            if label or event["event"] in ("step", "epoch"):
                why = event.get("reason") or event.get("path") or event.get("message") or ""
                moments.append([event["time"] - run.began, step, label or "", str(why)])
        saved = [
            moment for moment in moments if moment[2] == "checkpoint"
        ]  # many: they must not crowd out what is rare
        rare = [moment for moment in moments if moment[2] not in ("", "checkpoint")]
        plain = _thinned([moment for moment in moments if not moment[2]])
        lines.append(
            Line(name, number, sorted([*_thinned(rare), *_thinned(saved), *plain], key=lambda moment: moment[0]))
        )
    return Chart(
        "Progress, checkpoints, restarts and preemptions", "seconds since the run's first start", "steps done",
        "timeline", lines, from_zero=True, wide=True, legend=_LEGEND,
    )  # fmt: skip


def _curve(label: str, number: int, points: Points, dashed: bool = False) -> Line:
    """A line through the points that are numbers, with no more points than can be seen."""
    points = sorted(point for point in points if all(number_of(value) is not None for value in point))
    return Line(label, number, thinned(points, _POINTS, lambda point: float(point[1])), dashed)


def _thinned(points: list[Any]) -> list[Any]:
    """At most `_POINTS`, evenly chosen, the last one among them."""
    if len(points) <= _POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (_POINTS - 1))] for index in range(_POINTS)]


def _short(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
