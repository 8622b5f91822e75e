"""A sweep: one job for every combination of some settings, submitted together, and the table of the runs' results."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from lockstep.training import extras
from lockstep.training.config import settings
from lockstep.training.contract import EXIT_TIMED_OUT, UserError

from .backend import Backend, Mode, backend_of
from .job import Job
from .spec.model import JobSpec
from .status import EXIT_PRECEDENCE, Status, answer, columns, progress_printer, warn

METRICS = ("accuracy", "best_accuracy", "test_loss", "train_loss", "steps")
"""Keys of summary.json that are columns, if a run has them. The numbers that a script has logged come first."""
MAX_LOGGED = 8
"""Largest number of columns for the numbers that a script has logged."""


def parse(texts: list[str]) -> dict[str, list[Any]]:
    """Returns the values of `--sweep` by setting. Raises `UserError`.

    Examples:
        >>> sweep.parse(["lr=0.1,0.2", "batch_size=64"])
        {'lr': [0.1, 0.2], 'batch_size': [64]}
    """
    choices: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UserError(f"--sweep takes NAME=VALUE,VALUE,…, got {text!r}")
        if name in choices:
            raise UserError(f"--sweep {name} is given twice: give all its values in one")
        parsed = settings.parse_yaml(f"[{values}]", f"--sweep {name}")
        if not isinstance(parsed, list) or not parsed or None in parsed:
            raise UserError(f"--sweep {name}: expected values with commas between them, got {values!r}")
        choices[name] = parsed
    return choices


def expand(spec: JobSpec, values: dict[str, list[Any]]) -> list[JobSpec]:
    """Returns one spec for each combination: NAME-0, NAME-1, … with separate run directories. Raises `UserError`.

    Examples:
        >>> runs = sweep.expand(spec, {"lr": [0.001, 0.002]})
        >>> runs[1].name
        'smoke-1'
    """
    plain, specs = spec.plain(), []
    for index, combination in enumerate(itertools.product(*values.values())):
        changed = dict(zip(values, combination))
        # The last part of the path is the run's name in metrics, so it must differ between sweeps.
        own: dict[str, Any] = {"name": f"{spec.name}-{index}", "overrides": {**spec.overrides, **changed}}
        if spec.run_dir:
            own["run_dir"] = str(Path(spec.run_dir) / own["name"])
        text = ", ".join(f"{name}={value}" for name, value in changed.items())
        specs.append(JobSpec.of({**plain, **own}, f"the sweep's {text}"))
    return specs


@extras.explained()
def submit(spec: JobSpec, specs: list[JobSpec], backend: str = "slurm", mode: Mode = "attach") -> list[Job]:
    """Submits the runs of `expand(spec, …)`: together if the backend can, otherwise one by one. Raises `UserError`.

    Examples:
        >>> jobs = sweep.submit(spec, runs, backend="local")
        >>> [job.wait(timeout=3600).state for job in jobs]
        ['succeeded', 'succeeded']
    """
    opened = backend_of(backend).at(spec)
    return [Job(done.name, opened) for done in opened.sweep(spec.name, specs, mode)]


def submit_and_tell(
    opened: Backend, spec: JobSpec, texts: list[str], mode: Mode, wait: float | None, as_json: bool
) -> int:
    """Submits the runs, as one array if the backend can. With `wait`, waits for their ends and prints a table. Returns the exit code."""
    values = parse(texts)
    specs = expand(spec, values)
    done = opened.sweep(spec.name, specs, mode)
    if wait is None:
        answer(as_json, done, (item.text() for item in done))
        return 0
    runs = {one.name: {name: one.overrides[name] for name in values} for one in specs}
    return _to_the_end(opened, runs, wait, as_json)


def _to_the_end(backend: Backend, runs: dict[str, dict[str, Any]], seconds: float, as_json: bool) -> int:
    """Waits for the runs and prints their table. `runs`: name of a run → its changed settings. Returns the exit code of the worst run."""
    deadline = time.monotonic() + seconds
    codes, plain = list[int](), list[dict[str, Any]]()
    for name, changed in runs.items():
        status = backend.wait(name, max(0.0, deadline - time.monotonic()), progress_printer(name))
        codes.append(EXIT_TIMED_OUT if status.unfinished else status.code)
        summary = _summary(backend, name, status)
        reached = {metric: summary.get(metric) for metric in METRICS}
        ended = {"state": status.state, "exit_code": status.exit_code}
        plain.append({"name": name, **changed, **ended, **reached, "logged": _logged(summary)})
    metrics = [metric for metric in METRICS if any(run[metric] is not None for run in plain)]
    logged = list(dict.fromkeys(name for run in plain for name in run["logged"]))[:MAX_LOGGED]
    about = ("name", *next(iter(runs.values())), "state", "exit_code")
    rows = [(*map(run.get, about), *map(run["logged"].get, logged), *map(run.get, metrics)) for run in plain]
    head = tuple(name.upper() for name in (*about[:-1], "exit", *logged, *metrics))
    answer(as_json, plain, columns(head, [tuple(map(_cell, row)) for row in rows]))
    return min(codes, key=EXIT_PRECEDENCE.index)


def _summary(backend: Backend, name: str, status: Status) -> dict[str, Any]:
    """Returns the results of a run; {} if the run left no summary, or the summary cannot be read."""
    if not status.final:
        return {}
    try:
        return backend.summary(name)
    except UserError as error:
        if status.state == "succeeded":  # a shared folder may show the summary later
            warn(str(error))
        return {}


def _logged(summary: dict[str, Any]) -> dict[str, float]:
    """Returns the last value of each number that the script logged, and the best value of `checkpoint.keep_best`'s number."""
    logged = summary.get("logged")
    known = {name: value for name, value in logged.items() if name not in METRICS} if isinstance(logged, dict) else {}
    best = {name: summary.get(name) for name in (f"best_{one}" for one in known)}
    return {name: value for name, value in {**best, **known}.items() if isinstance(value, (int, float))}


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.4g}"
    return "" if value is None else str(value)
