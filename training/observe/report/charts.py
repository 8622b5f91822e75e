"""The charts of the report: the lines of each, and the same numbers as a table. `assets/report.js` draws them."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lockstep.wire.status import goodput_line, slow_rank_line, slow_rank_of

from ..account import STARTING, TimeCategory
from .record import RunRecord, number_of, thinned

_POINTS = 400
"""Most points of a curve."""
_BARS = 32
"""Most bars of ranks or attempts. Of more ranks, the chart has those that the others wait for; of more attempts, the last."""
MAX_LOGGED = 12
"""Most charts of values that users' loops have logged."""
_MOMENTS = (
    "start", "resumed", "checkpoint_written", "checkpoint_sent", "checkpoint_failed", "preempted", "nonfinite", "corrupt_checkpoint",
    "hang", "rank_lost", "rank_joined", "slow_rank", "slow_rank_over", "done",
)  # fmt: skip
"""Events that the timeline marks."""
_PHASES = {
    "data_wait": "waiting for data", "grad_ready": "forward and backward", "sync_wait": "waiting for other ranks",
    "rest": "optimizer and rest",
}  # fmt: skip
_SPENT = {
    "productive": (TimeCategory.PRODUCTIVE,),
    "waiting for data or ranks": (TimeCategory.DATA_WAIT, TimeCategory.RANK_WAIT),
    "checkpoints and evaluation": (TimeCategory.CHECKPOINT, TimeCategory.EVALUATION),
    "starting and ending": (*STARTING, TimeCategory.ENDING),
    "taken again, hung, regrouped": (TimeCategory.TAKEN_AGAIN, TimeCategory.HANG, TimeCategory.REGROUP),
    "down or unknown": (TimeCategory.DOWN, TimeCategory.UNKNOWN),
}
"""Name in the chart → categories of the wall clock."""
Points = list[list[Any]]
"""[x, y] each; of the timeline [seconds, step, what happened or "", why]; of bars [name, length]."""


class TableRow(NamedTuple):
    """A row of a table. `differs`: the runs have different values, and the row is marked."""

    name: str
    cells: list[str]
    differs: bool = False


class Table(NamedTuple):
    head: list[str]
    rows: list[TableRow]


@dataclass(slots=True)
class Line:
    """A line of a chart. `number`: index of the run from 0, or in bars of the phase; it selects mark, dash and colour."""

    label: str
    number: int
    points: Points
    dashed: bool = False


@dataclass(slots=True)
class Chart:
    """A chart: lines with points, over axes whose labels `x` and `y` have units."""

    title: str
    x: str
    y: str
    kind: Literal["line", "timeline", "stack"]
    lines: list[Line]
    from_zero: bool = False
    stepped: bool = False
    """Whether a value holds until the next point."""

    def __post_init__(self) -> None:
        self.lines = [line for line in self.lines if line.points]

    @property
    def drawn(self) -> dict[str, Any]:
        """The chart for `assets/report.js`. `log`: the largest value is so far above the others that they would lie on the axis."""
        values = sorted(point[1] for line in self.lines for point in line.points if self.kind == "line")
        log = bool(values) and values[0] > 0 and values[-1] > 100 * values[len(values) // 2]
        return {**dataclasses.asdict(self), "log": log}

    @property
    def table(self) -> Table:
        """A table with a row for each point; for the timeline, for each marked point."""
        points = [(line.label, point) for line in self.lines for point in line.points if point[2:3] != [""]]
        cells = [[f"{value:.6g}" if isinstance(value, float) else str(value) for value in point] for _, point in points]
        return Table(["", self.x, self.y], [TableRow(label, texts) for (label, _), texts in zip(points, cells)])


def of(runs: Sequence[RunRecord], names: list[str]) -> list[Chart]:
    """Returns the charts of some runs, in the order of the page, without empty charts."""
    named = list(zip(runs, names))
    timeline = Chart(
        "Progress, checkpoints, restarts and preemptions", "seconds since the run's first start", "steps done", "timeline",
        [Line(name, number, _moments(run)) for number, (run, name) in enumerate(named)],
        from_zero=True,
    )  # fmt: skip
    ranks = Chart(
        "Ranks that train", "seconds since the run's first start", "ranks", "line",
        [Line(name, number, _sizes(run)) for number, (run, name) in enumerate(named)],
        from_zero=True, stepped=True,
    )  # fmt: skip
    charts = [*_curves(named), *_by_rank(named), *_by_attempt(named), ranks, timeline]
    return [chart for chart in charts if chart.lines]


def _curves(named: list[tuple[RunRecord, str]]) -> list[Chart]:
    loss, accuracy, speed = [], [], []
    logged: dict[str, list[Line]] = defaultdict(list)
    for number, (run, name) in enumerate(named):
        readings, epochs, scored = run.of("step"), run.of("epoch"), run.of("epoch", "score")
        trained = _over_steps(readings if len(readings) > len(epochs) else epochs, "train_loss")
        loss.append(_curve(f"{name}, training", number, trained))
        loss.append(_curve(f"{name}, test", number, _over_steps(scored, "test_loss"), dashed=True))
        accuracy.append(_curve(name, number, _over_steps(scored, "accuracy")))
        speed.append(_curve(name, number, _speeds(epochs)))
        values: dict[str, Points] = defaultdict(list)
        for event in run.of("log"):
            for key, value in event["values"].items():
                values[key].append([event["step"], value])
        for key, points in values.items():
            logged[key].append(_curve(name, number, points))
    others = [key for key in logged if key not in ("accuracy", "test_loss")]  # these have a chart already
    return [
        Chart("Loss", "steps", "mean cross entropy", "line", loss),
        Chart("Test accuracy", "steps", "accuracy, 0 to 1", "line", accuracy),
        Chart("Throughput", "steps", "samples a second, all ranks", "line", speed, from_zero=True),
        *(Chart(f"Logged: {key}", "steps", key, "line", logged[key]) for key in others[:MAX_LOGGED]),
    ]


def _over_steps(events: list[dict[str, Any]], key: str) -> Points:
    return [[event.get("step"), event.get(key)] for event in events]


def _curve(label: str, number: int, points: Points, dashed: bool = False) -> Line:
    """Returns a line through the points that are numbers, with at most `_POINTS` points."""
    points = sorted(point for point in points if all(number_of(value) is not None for value in point))
    return Line(label, number, thinned(points, _POINTS, lambda point: float(point[1])), dashed)


def _speeds(epochs: list[dict[str, Any]]) -> Points:
    """Returns [step, samples/s within the epoch that ended there]."""
    wanted = ("step", "examples_seen", "trained_seconds")
    known: Points = [[0.0, 0.0, 0.0], *([number_of(event.get(name)) for name in wanted] for event in epochs)]
    return [
        [step, (images - before) / (seconds - then)]
        for (_, before, then), (step, images, seconds) in itertools.pairwise(one for one in known if None not in one)
        if images > before and seconds > then
    ]


def _by_rank(named: list[tuple[RunRecord, str]]) -> list[Chart]:
    charts = []
    for run, name in named:
        rows = sorted(run.ranks, key=lambda row: row["sync_wait"])[:_BARS] if len(run.ranks) > _BARS else run.ranks
        lines = [
            Line(label, number, [[f"rank {int(row['rank'])}", row[phase] * 1e3] for row in rows])
            for number, (phase, label) in enumerate(_PHASES.items())
        ]
        title = "Where a step goes, by rank" + (f": {name}" if len(named) > 1 else "")
        if len(rows) < len(run.ranks):
            title += f" (the {len(rows)} of {len(run.ranks)} that wait least for others)"
        slow = slow_rank_of(run.status)
        remark = "" if slow is None else f". At its end: {slow_rank_line(slow)}"
        charts.append(Chart(title, f"milliseconds a step, mean of the last attempt{remark}", "", "stack", lines))
    return charts


def _by_attempt(named: list[tuple[RunRecord, str]]) -> list[Chart]:
    charts = []
    for run, name in named:
        attempts: dict[int, dict[TimeCategory, float]] = defaultdict(lambda: defaultdict(float))
        for part in run.account.stretches:
            for category, seconds in part.seconds.items():
                attempts[part.attempt][category] += seconds
        shown = sorted(attempts)[-_BARS:]
        lines = [
            Line(
                label,
                number,
                [[f"attempt {one}", sum(attempts[one][category] for category in categories)] for one in shown],
            )
            for number, (label, categories) in enumerate(_SPENT.items())
        ]
        title = "Where the time of the job went" + (f": {name}" if len(named) > 1 else "")
        unit = f"seconds of the wall clock, down before the attempt: {goodput_line(run.account.shares())}"
        charts.append(Chart(title, unit, "", "stack", lines if shown else []))
    return charts


def _sizes(run: RunRecord) -> Points:
    """Returns the number of ranks from each start and each loss on; [] if it never changed."""
    known = [(event["time"] - run.began, number_of(event.get("world_size"))) for event in run.of("start", "regrouped")]
    sizes = [[moment, size] for moment, size in known if size is not None]
    if len({size for _, size in sizes}) < 2:
        return []
    return thinned([*sizes, [run.events[-1]["time"] - run.began, sizes[-1][1]]], _POINTS, lambda point: float(point[1]))


def _moments(run: RunRecord) -> Points:
    """Returns the marks of a run's timeline. Each kind of event has its own bound, so that frequent kinds do not displace rare ones."""
    moments: dict[str, Points] = defaultdict(list)
    step = 0.0
    for event in run.events:
        step = number_of(event.get("step")) or step
        kind = event["event"]
        label = kind.removesuffix("_written").replace("_", " ") if kind in _MOMENTS else ""
        if label == "start" and (number_of(event.get("attempt")) or 0) > 1:
            label = "restart"
        if label or kind in ("step", "epoch"):
            of_rank = kind in ("rank_lost", "rank_joined", "slow_rank_over")
            who = f"rank {event.get('rank')} {event.get('how', '')}".rstrip() if of_rank else ""
            slow = "" if (rank := slow_rank_of({kind: event})) is None else slow_rank_line(rank)
            why = who or slow or event.get("reason") or event.get("path") or event.get("message") or ""
            moments[label].append([event["time"] - run.began, step, label, str(why)])
    return sorted(moment for some in moments.values() for moment in thinned(some, _POINTS))
