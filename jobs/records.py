"""What a job's processes leave for later commands, read with the shape that it was written in, or not at all.

A disk that was full, another version or another hand may have written it: one damaged file must hide no job.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import NotRequired, TypedDict

from lockstep.training import contract, files

R = TypeVar("R")


class Said(TypedDict):
    """status.json of a run."""

    code: int | None
    step: int
    attempt: int
    reason: str
    job: NotRequired[str]
    restart: NotRequired[int]


class Process(TypedDict):
    """A supervisor or a launcher."""

    pid: int
    ticks: int | None


class Ended(TypedDict):
    """How a local job ended."""

    code: int | None
    reason: str
    timed_out: bool
    job: str


class LocalJob(TypedDict):
    """job.json of a local job."""

    spec: dict[str, Any]
    hash: str
    run_dir: str
    command: list[str]
    env: dict[str, str]
    time_limit: float
    grace: float
    created: str
    job: str
    host: str


class Note(TypedDict):
    """What a task of SLURM says of its rank's end."""

    code: int
    rank: NotRequired[int]
    reason: NotRequired[str]
    restart: NotRequired[int]
    host: NotRequired[str]
    time: NotRequired[float]


class SlurmPart(TypedDict):
    """A node in the recorded end of a SLURM job."""

    name: str
    ranks: list[int]
    state: str
    reason: str
    restarts: int


class SlurmEnded(TypedDict):
    """How a SLURM job ended."""

    state: str
    reason: str
    ranks: list[SlurmPart]
    exit_code: int | None


class SlurmJob(TypedDict):
    """job.json of a SLURM job; `job_id` is None until sbatch has answered."""

    spec: dict[str, Any]
    hash: str
    run_dir: str
    submitit: str
    job_id: str | None
    created: str
    since: float
    comment: str
    array_name: str
    element: NotRequired[int | None]
    job: str


_FOUND_BY = ("job", "host", "run_dir", "submitit", "job_id")
"""Processes, folders and machines are found by these. An empty one would find all of them."""
_SHAPES: dict[type[Any], Any] = {}


def _shape(kind: type[Any]) -> Any:
    if kind not in _SHAPES:
        from pydantic import TypeAdapter  # a supervisor needs it at the end of its job only

        _SHAPES[kind] = TypeAdapter(kind)
    return _SHAPES[kind]


def parse(value: Any, kind: type[R]) -> R | None:
    """The record that a plain value holds; None where a key is missing, a value has another type, or a name is blank."""
    try:
        found: R = _shape(kind).validate_python(value, strict=True)
    except ValueError:  # pydantic's
        return None
    words = (value[name] for name in _FOUND_BY if isinstance(value.get(name), str))
    return None if any(not word.strip() or "\0" in word for word in words) else found


def read(path: Path, kind: type[R]) -> R | None:
    """The record in a JSON file; None where the file is missing or damaged."""
    return parse(files.read_json(path), kind)


def process(path: Path) -> Process | None:
    """A process that can be asked for and signalled: never a group (0, −1, …) nor init."""
    found = read(path, Process)
    return found if found is not None and found["pid"] > 1 else None


def identity(name: str) -> str:
    """What one submission of a job is known by: its ranks have it in their environment, and write it into status.json."""
    return f"{name}.{uuid.uuid4().hex[:12]}"


def restarts(said: Said | None) -> int:
    """How often the launcher has started the ranks again, from a run's status.json."""
    return max(0, said.get("restart", 0)) if said is not None else 0


def progress(said: Said | None) -> str:
    """How far a run is whose processes live, from its status.json: the step, at most some seconds old, and how often it was
    restarted. An attempt that has ended may be the last one, or be followed by another."""
    if said is None:
        return "starting"
    ended = (
        "" if said["code"] is None else ", ending" if said["code"] == contract.EXIT_DONE else ", the attempt has ended"
    )
    return f"step {said['step']}" + (f", restart {again}" if (again := restarts(said)) else "") + ended


def said(run_dir: Path, job: str) -> Said | None:
    """status.json of this very job, which is trusted above exit codes; not one of another run in the same directory."""
    found = read(run_dir / contract.STATUS_FILE, Said)
    return found if found is not None and found.get("job") == job else None
