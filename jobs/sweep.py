"""A sweep: one job for every combination of some settings, submitted together."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from lockstep.jobs import registry
from lockstep.jobs.backend import Mode
from lockstep.jobs.job import Job
from lockstep.jobs.spec.model import JobSpec
from lockstep.training import extras
from lockstep.training.config import settings
from lockstep.training.contract import UserError

MAX_RUNS = 1000


def parse(texts: list[str]) -> dict[str, list[Any]]:
    """`["lr=0.1,0.2"]` → `{"lr": [0.1, 0.2]}`. Raises `UserError`."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name or not values:
            raise UserError(f"--sweep takes NAME=VALUE,VALUE,…, got {text!r}")
        if name in found:
            raise UserError(f"--sweep {name} is given twice: give all its values in one")
        parsed = settings.parse_yaml(f"[{values}]", f"--sweep {name}")
        if not isinstance(parsed, list) or not parsed or None in parsed:
            raise UserError(f"--sweep {name}: expected values with commas between them, got {values!r}")
        found[name] = parsed
    return found


def expand(spec: JobSpec, values: dict[str, list[Any]]) -> list[JobSpec]:
    """One spec a combination: NAME-0, NAME-1, … with run directories of their own. Raises `UserError`."""
    runs = math.prod(len(choices) for choices in values.values())
    if runs > MAX_RUNS:
        raise UserError(f"the sweep has {runs} runs, more than {MAX_RUNS}: give fewer values")
    for name, choices in values.items():
        twice = next((value for number, value in enumerate(choices) if _among(value, choices[:number])), None)
        if twice is not None:
            raise UserError(f"--sweep {name} has {twice!r} twice: give each value once, or another seed for each run")
    plain, found = spec.plain(), []
    for index, combination in enumerate(itertools.product(*values.values())):
        changed = dict(zip(values, combination))
        # The last part of it is the run's name in metrics: two sweeps must not have the same.
        run_dir = str(Path(spec.run_dir) / f"{spec.name}-{index}") if spec.run_dir else None
        own = {
            "name": f"{spec.name}-{index}",
            "overrides": {**spec.overrides, **changed},
            **({"run_dir": run_dir} if run_dir else {}),
        }
        told = ", ".join(f"{name}={value}" for name, value in changed.items())
        found.append(JobSpec.of({**plain, **own}, f"the sweep's {told}"))
    return found


def _among(value: Any, others: list[Any]) -> bool:
    """Whether it is there already; 1 and 1.0 are the same, 1 and true are not."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in others)


@extras.explained()
def submit(spec: JobSpec, specs: list[JobSpec], backend: str = "slurm", mode: Mode = "attach") -> list[Job]:
    """Submits the runs of `expand(spec, …)`: as one where the backend can, else one by one. Raises `UserError`."""
    opened = registry.backend(backend).at(spec)
    return [Job(done.name, opened) for done in opened.sweep(spec.name, specs, mode)]
