"""What a job's processes leave for later commands, read with the shape that it was written in, or not at all.

A disk that was full, another version or another hand may have written it: one damaged file must hide no job.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training import contract, files

Shape = dict[str, type | tuple[type, ...]]
STATUS: Shape = {"code": (int, type(None)), "step": int, "attempt": int, "reason": str}
"""status.json of a run."""
PROCESS: Shape = {"pid": int, "ticks": (int, type(None))}
ENDED: Shape = {"code": (int, type(None)), "reason": str, "job": str}
NOTE: Shape = {"code": int}
"""What a task of SLURM says of its rank's end."""


def fits(value: Any, shape: Shape) -> bool:
    """Whether it is a mapping in which each of these names has a value of its kind; true and false are no numbers."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) and not isinstance(value.get(name), bool) for name, kind in shape.items()
    )


def read(path: Path, shape: Shape) -> dict[str, Any] | None:
    """The mapping in a JSON file; None where the file is missing or damaged, or a value is missing or of another kind."""
    value = files.read_json(path)
    return value if fits(value, shape) else None


def process(path: Path) -> dict[str, Any] | None:
    """A process that can be asked for and signalled: never a group (0, −1, …) nor init."""
    found = read(path, PROCESS)
    return found if found is not None and found["pid"] > 1 else None


def identity(name: str) -> str:
    """What one submission of a job is known by: its ranks have it in their environment, and write it into status.json."""
    return f"{name}.{uuid.uuid4().hex[:12]}"


def restarts(said: Mapping[str, Any] | None) -> int:
    """How often the launcher has started the ranks again, from a run's status.json."""
    again = said.get("restart") if said is not None else None
    return again if isinstance(again, int) and again > 0 else 0


def progress(said: Mapping[str, Any] | None) -> str:
    """How far a run is that trains, from its status.json: the step, at most some seconds old, and how often it was restarted."""
    if said is None or not isinstance(said.get("step"), int):
        return "starting"
    return f"step {said['step']}" + (f", restart {again}" if (again := restarts(said)) else "")


def said(run_dir: Path, job: str) -> dict[str, Any] | None:
    """status.json of this very job, which is trusted above exit codes; not one of another run in the same directory."""
    found = read(run_dir / contract.STATUS_FILE, STATUS)
    return found if found is not None and found.get("job") == job else None
