"""Reads a run directory for the report: run.yaml, status.json, summary.json, events.jsonl and the ranks' textfiles.

Every file may be missing, cut off or damaged, and may hold anything: the reader uses the readable part. A run of a million steps has
a hundred thousand readings. As mappings they would take a kilobyte each, in columns 24 bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ... import contract, files
from ...config import settings
from ...contract import UserError
from .. import account
from ..account import Account

_EVENT_BYTES = 128 << 20
"""Most bytes to read of events.jsonl: about 600,000 lines. Later lines are ignored."""
_EVENT_LINES = 1_500_000
"""Most lines to read: lines without an event are short, and there could be a hundred million."""
_LINE_BYTES = 1 << 16
_READINGS = 4000
"""Most readings to keep of the loss, and of each value that a user's loop has logged: those that a chart can show."""
_NAMES = 100
"""Most names of logged values, and most kinds of events."""
_OTHERS = 20_000
"""Most events of each other kind: at this number every second event is dropped, again and again."""
_LARGEST = 1e15
"""Limit of a count or a number of seconds: a larger one is damaged."""
_LATEST = 253_402_300_800.0
"""Unix time at the end of the year 9999, beyond which there are no dates."""
_SECONDS = re.compile(r"(?m)^training_(\w+_seconds_(?:sum|count))(?:\{.*\})? (\S+)$")
"""Lines of the phases' seconds in Prometheus' text."""
PHASES = ("data_wait", "grad_ready", "sync_wait")
T = TypeVar("T")


@dataclass(slots=True)
class RunRecord:
    """The content of a run directory. Times are Unix seconds."""

    path: Path
    about: dict[str, Any]
    """The content of run.yaml, unchecked."""
    status: dict[str, Any]
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    account: Account
    """The account of the time."""
    ranks: list[dict[str, float]]
    """For each rank: phase, or `rest` → mean seconds per step, in the last attempt."""

    def part(self, name: str) -> dict[str, Any]:
        """Returns a mapping within run.yaml; {} if there is none."""
        return _mapping(self.about.get(name))

    @property
    def began(self) -> float:
        """Time of the first event; 0: there is none."""
        return float(self.events[0]["time"]) if self.events else 0.0

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of these kinds."""
        return [event for event in self.events if event["event"] in kinds]


def read(path: Path) -> RunRecord:
    """Returns the record of a run directory. Raises `UserError` if `path` is no run directory."""
    run_file = path / contract.RUN_FILE
    if not run_file.is_file():
        raise UserError(f"{path} does not hold a run (no {contract.RUN_FILE}): give the run directory, e.g. runs/smoke")
    path = path.resolve()
    status, summary = (_mapping(files.read_json(path / name)) for name in (contract.STATUS_FILE, contract.SUMMARY_FILE))
    events, ranks = _events(path / contract.EVENTS_FILE), _ranks(path / contract.METRICS)
    return RunRecord(path, settings.read_yaml(run_file), status, summary, events, account.of_run(path), ranks)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def number_of(value: Any) -> float | None:
    """Returns the value as a finite number; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 308 digits
        return None


def thinned(points: Sequence[T], most: int, height: Callable[[T], float] = lambda _: 0.0) -> list[T]:
    """Returns at most `most` (4 or more) of the points, in their order: the first, the last, the lowest and the highest of each stretch.

    A chart that is 500 pixels wide shows only the least and the greatest value of each pixel.

    Args:
        height: returns the height of a point; infinite: it has none.
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = len(points) - 2, (most - 2) // 2
    chosen = [points[0]]
    for number in range(stretches):
        low, high = 1 + number * inner // stretches, 1 + (number + 1) * inner // stretches
        known = [(value, at) for at in range(low, high) if math.isfinite(value := height(points[at]))] or [(0.0, low)]
        chosen += [points[at] for at in sorted({min(known)[1], max(known)[1]})]  # of equal ones the first and the last
    return [*chosen, points[-1]]


class _Series:
    """Readings of one number, in the order of their times."""

    def __init__(self) -> None:
        self._step, self._time, self._value = array("d"), array("d"), array("d")

    def add(self, event: dict[str, Any], value: Any) -> None:
        for column, number in zip((self._step, self._time, self._value), (event.get("step"), event["time"], value)):
            known = number_of(number)
            column.append(-math.inf if known is None else known)  # NaN would have no place in an order

    def events(self, kind: str, name: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields some readings by step, with the least and the greatest. If a step was read twice, the last reading counts."""
        steps = self._step
        order = sorted(range(len(steps)), key=steps.__getitem__)
        pairs = itertools.zip_longest(order, order[1:])
        last = array("q", (one for one, other in pairs if other is None or steps[one] != steps[other]))
        for at in thinned(last, _READINGS, self._value.__getitem__):
            step, value = number_of(steps[at]), number_of(self._value[at])
            content = {"train_loss": value} if name is None else {"values": {name: value}}
            yield {"event": kind, "time": self._time[at], "step": step, **content}


def _events(path: Path) -> list[dict[str, Any]]:
    """Returns the events by time. For steps that an attempt lost and a later one took again, those of the later attempt."""
    losses = _Series()
    logged: dict[str, _Series] = defaultdict(_Series)
    others: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in _lines(path):
        kind = event["event"]
        if kind == "step":
            losses.add(event, event.pop("train_loss", None))
        if kind in ("step", "log"):
            trained = {name: value for name, value in event.items() if name.startswith("train_")}
            for name, value in (trained if kind == "step" else _mapping(event.get("values"))).items():
                if name in logged or len(logged) < _NAMES:
                    logged[name].add(event, value)
        elif kind in others or len(others) < _NAMES:
            others[kind].append(event)
            if len(others[kind]) >= _OTHERS:
                del others[kind][::2]
    epochs = {number_of(event.get("step")): event for event in others.pop("epoch", [])}
    events = [event for kept in others.values() for event in kept]
    events += [*epochs.values(), *losses.events("step")]
    events += [event for name, series in logged.items() for event in series.events("log", name)]
    return sorted(events, key=lambda event: float(event["time"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of the file that have a kind and a time."""
    try:
        with files.regular(path) as file:
            for _ in range(_EVENT_LINES):
                if file.tell() >= _EVENT_BYTES or not (line := file.readline(_LINE_BYTES)):
                    return
                event: dict[str, Any] = {}
                if line.startswith(b"{"):
                    with contextlib.suppress(ValueError):  # cut off by a kill
                        event = _mapping(files.parsed(line))
                if isinstance(event.get("event"), str) and 0 < (number_of(event.get("time")) or 0) < _LATEST:
                    yield event
    except OSError:
        return


def _ranks(folder: Path) -> list[dict[str, float]]:
    rows = []
    for path in sorted(folder.glob("rank-*.prom")):
        try:
            values = {name: float(value) for name, value in _SECONDS.findall(files.read(path, 1 << 20).decode())}
        except (OSError, ValueError):
            continue
        # Counts and seconds below zero, infinite or NaN are damaged.
        values = {name: value for name, value in values.items() if 0 <= value < _LARGEST}
        steps, spent = values.get("step_duration_seconds_count", 0.0), values.get("step_duration_seconds_sum", 0.0)
        digits = path.stem.removeprefix("rank-")
        if steps >= 1 and spent > 0 and digits.isascii() and digits.isdigit():
            row = {phase: values.get(f"{phase}_seconds_sum", 0.0) / steps for phase in PHASES}
            rows.append({"rank": float(digits), **row, "rest": max(0.0, spent / steps - sum(row.values()))})
    return rows
