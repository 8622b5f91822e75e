"""Reads a run directory for the report: run.yaml, status.json, summary.json, events.jsonl and the ranks' textfiles.

Every file may be missing, cut off or damaged, and may hold anything: what can be read is used, the rest is left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.training import contract, files
from lockstep.training.config import settings
from lockstep.training.contract import UserError
from lockstep.training.observe.report.series import Reading, Series

_EVENT_BYTES = 128 << 20
"""Read of events.jsonl, at most: about 600,000 lines. What follows is left out."""
_EVENT_LINES = 1_500_000
"""Of them, at most: lines without an event are short, and there could be a hundred million."""
_LINE_BYTES = 1 << 16
_READINGS = 4000
"""Most readings of the loss, and of each value that a loop of one's own has logged, that are kept: those that show."""
_NAMES = 100
"""Most names of such values, and kinds of events."""
_OTHERS = 20_000
"""Most events of each other kind: from there on every second one is left out, again and again."""
_LARGEST = 1e15
"""A count or a number of seconds from here on is damaged."""
_LATEST = 253_402_300_800.0
"""Unix time at the end of the year 9999, beyond which there are no dates."""
_OF_PHASES = re.compile(r"(?m)^training_\w+_seconds_(?:sum|count)[ {].*\n")
PHASES = ("data_wait", "grad_ready", "sync_wait")


@dataclass(slots=True)
class RunRecord:
    """What one run directory holds. Times are Unix seconds."""

    name: str
    path: Path
    about: dict[str, Any]
    """run.yaml as it stands."""
    status: dict[str, Any]
    summary: dict[str, Any]
    events: list[dict[str, Any]]
    ranks: list[dict[str, float]]
    """By rank: mean seconds a step of each phase, `rest`, `step_duration`, and `steps` of the last attempt."""

    @property
    def config(self) -> dict[str, Any]:
        """Settings by their dotted names."""
        return settings.dotted(self.part("config"))

    def part(self, name: str) -> dict[str, Any]:
        """A mapping within run.yaml; empty where there is none."""
        value = self.about.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def began(self) -> float:
        """Time of the first event; 0 where there is none."""
        return float(self.events[0]["time"]) if self.events else 0.0

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event["event"] in kinds]


def read(path: Path) -> RunRecord:
    """Raises `UserError` where `path` is not a run directory."""
    run_file = path / contract.RUN_FILE
    if not run_file.is_file():
        raise UserError(f"{path} does not hold a run (no {contract.RUN_FILE}): give the run directory, e.g. runs/smoke")
    path = path.resolve()
    return RunRecord(
        path.name, path, settings.read_yaml(run_file), _mapping(path / contract.STATUS_FILE),
        _mapping(path / contract.SUMMARY_FILE), _events(path / contract.EVENTS_FILE), _ranks(path / contract.METRICS),
    )  # fmt: skip


def _mapping(path: Path) -> dict[str, Any]:
    value = files.read_json(path)
    return value if isinstance(value, dict) else {}


def _events(path: Path) -> list[dict[str, Any]]:
    """The events in order. Of what an attempt lost and a later one took again, the later one's."""
    events: list[dict[str, Any]] = []
    losses, logged = Series(), dict[str, Series]()
    counts, strides = dict[str, int](), dict[str, int]()
    try:
        with files.regular(path) as file:
            for _ in range(_EVENT_LINES):
                if file.tell() >= _EVENT_BYTES or not (line := file.readline(_LINE_BYTES)):
                    break
                if not line.startswith(b"{"):
                    continue
                try:
                    value = files.parsed(line)
                except ValueError:
                    continue  # cut off by a kill
                if isinstance(value, dict) and isinstance(value.get("event"), str):
                    at = number_of(value.get("time"))
                    if at is None or not 0 < at < _LATEST:
                        continue
                    if value["event"] == "step":
                        losses.add(*_where(value), at, number_of(value.get("train_loss")))
                    elif value["event"] == "log":
                        _log(value, at, logged)
                    else:
                        events = _kept(value, events, counts, strides)
    except OSError:
        return []
    last = {_place(event): index for index, event in enumerate(events)}
    events = [event for index, event in enumerate(events) if event["event"] != "epoch" or last[_place(event)] == index]
    events += [_event("step", reading, train_loss=reading.value) for reading in losses.fewer(_READINGS)]
    events += [
        _event("log", reading, values={name: reading.value})
        for name, series in logged.items()
        for reading in series.fewer(_READINGS)
    ]
    return sorted(events, key=lambda event: float(event["time"]))


def _where(event: dict[str, Any]) -> tuple[float | None, float | None]:
    return number_of(event.get("step")), number_of(event.get("epoch"))


def _log(event: dict[str, Any], at: float, logged: dict[str, Series]) -> None:
    values = event.get("values")
    for name, value in values.items() if isinstance(values, dict) else ():
        if name in logged or len(logged) < _NAMES:
            logged.setdefault(name, Series()).add(*_where(event), at, number_of(value))


def _kept(
    event: dict[str, Any], events: list[dict[str, Any]], counts: dict[str, int], strides: dict[str, int]
) -> list[dict[str, Any]]:
    """`events` with the event added. Of a kind that has very many events, only every second, fourth, … is kept."""
    kind = event["event"]
    if kind not in counts and len(counts) >= _NAMES:
        return events
    counts[kind] = number = counts.get(kind, 0) + 1
    stride = strides.setdefault(kind, 1)
    if number % stride:
        return events
    events.append(event)
    if number // stride >= _OTHERS:
        strides[kind], counts[kind] = 2 * stride, 0
        seen = 0
        rest = []
        for other in events:
            seen += other["event"] == kind
            if other["event"] != kind or seen % 2:
                rest.append(other)
        return rest
    return events


def _event(kind: str, reading: Reading, **more: Any) -> dict[str, Any]:
    about = {"event": kind, "time": reading.time, "step": reading.step, "epoch": reading.epoch, **more}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in about.items()}


def _place(event: dict[str, Any]) -> tuple[str, float | None]:
    return event["event"], number_of(event.get("step"))


def number_of(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of more than 308 digits
        return None


def _ranks(folder: Path) -> list[dict[str, float]]:
    from prometheus_client.parser import text_string_to_metric_families

    rows = []
    for path in sorted(folder.glob("rank-*.prom")):
        try:
            text = "".join(
                _OF_PHASES.findall(files.read(path, 1 << 20).decode())
            )  # of a hundred lines the five that count
            families = list(text_string_to_metric_families(text))
        except Exception:  # noqa: BLE001, S112 - the parser raises whatever a damaged file makes it trip over
            continue
        values = {
            s.name.removeprefix("training_"): s.value for f in families for s in f.samples if "le" not in s.labels
        }
        # Counts and seconds below zero, infinite or NaN are damaged. (A loss may be NaN; it is not read here.)
        values = {name: float(value) for name, value in values.items() if 0 <= value < _LARGEST}
        steps, spent = values.get("step_duration_seconds_count", 0.0), values.get("step_duration_seconds_sum", 0.0)
        digits = path.stem.removeprefix("rank-")
        if steps >= 1 and spent > 0 and digits.isascii() and digits.isdigit():
            row = {phase: values.get(f"{phase}_seconds_sum", 0.0) / steps for phase in PHASES}
            row |= {"rest": max(0.0, spent / steps - sum(row.values())), "step_duration": spent / steps}
            rows.append({"rank": float(digits), "steps": steps, **row})
    return rows
