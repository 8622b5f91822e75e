"""`lockstep submit --sweep`: many runs, and a table of what they reached."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jobs import connect
from jobs import sweep as sweeps
from jobs.cli.names import teller, unfinished
from jobs.spec.model import JobSpec
from jobs.status import WORST
from jobs.terminal import say, show, table, warn
from training.contract import EXIT_TIMED_OUT, UserError

if TYPE_CHECKING:
    from jobs.backend import Backend, Mode
    from jobs.status import Status


def submit(spec: JobSpec, backend: str, texts: list[str], mode: Mode, wait: float | None, as_json: bool) -> int:
    """Submits the runs as one array; with `wait`, to the end and a table of what they reached. Returns the exit code."""
    if mode == "new":
        raise UserError("--new does not work with --sweep, whose runs are numbered already: choose another --name")
    opened = connect.connect(backend, spec)
    values = sweeps.parse(texts)
    specs = sweeps.expand(spec, values)
    done = opened.sweep(spec.name, specs, mode)
    if wait is None:
        if as_json:
            show([{"name": item.name, "created": item.created, "where": item.where} for item in done])
        for item in [] if as_json else done:
            say(
                f"{item.name}: {'submitted' if item.created else 'is there already, with the same spec'} ({item.where})"
            )
        return 0
    deadline = time.monotonic() + wait
    found = [opened.wait(item.name, max(0.0, deadline - time.monotonic()), teller(item.name)) for item in done]
    rows = [_row(opened, one, status, list(values)) for one, status in zip(specs, found)]
    if as_json:
        show(rows)
    else:
        head = ("NAME", *values, "STATE", "ACCURACY")
        table(tuple(text.upper() for text in head), [tuple(_cell(value) for value in row.values()) for row in rows])
    return min((EXIT_TIMED_OUT if unfinished(status) else status.code for status in found), key=WORST.index)


def _row(backend: Backend, spec: JobSpec, status: Status, names: list[str]) -> dict[str, Any]:
    accuracy = None
    if status.state == "succeeded":
        try:
            accuracy = backend.summary(spec.name).get("accuracy")
        except UserError as error:  # a shared folder may show it later
            warn(str(error))
    return {
        "name": spec.name,
        **{name: spec.overrides[name] for name in names},
        "state": status.state,
        "accuracy": accuracy,
    }


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) and value >= 0.01 else str(value)
