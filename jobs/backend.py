"""The protocol that every backend answers, and what its answers mean. One contract test holds all of them to it.

backend.submit(spec)                 # idempotent by name and hash of the spec
backend.status("smoke")              # Status(state, reason, ranks, exit_code)
backend.wait("smoke", timeout=60)    # bounded, always
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from training import contract, files
from training.contract import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_TIMED_OUT, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from jobs.spec.model import JobSpec

EXIT_UNSCHEDULABLE = 3
EXIT_LOST = 4

State = Literal[
    "pending", "queued", "unschedulable", "running", "restarting",
    "succeeded", "failed", "preempted", "cancelled", "timed_out", "lost",
]  # fmt: skip
FINAL = ("succeeded", "failed", "preempted", "cancelled", "timed_out", "lost")
_CODES = {
    "succeeded": EXIT_DONE, "failed": EXIT_FAILED, "unschedulable": EXIT_UNSCHEDULABLE, "lost": EXIT_LOST,
    "preempted": EXIT_PREEMPTED, "cancelled": EXIT_PREEMPTED, "timed_out": EXIT_TIMED_OUT,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """One node of the job."""

    name: str
    ranks: list[int]
    state: str
    reason: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Where a job stands. `reason` says why in one sentence; `exit_code` is the job's own, None while it runs."""

    state: State
    reason: str
    ranks: list[Part] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def code(self) -> int:
        """The exit code of `lockstep status` and `lockstep wait`; 0 while the job is under way."""
        if self.state == "failed" and self.exit_code == EXIT_USAGE:
            return EXIT_USAGE
        return _CODES.get(self.state, EXIT_DONE)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "final": self.final}


@dataclass(frozen=True, slots=True)
class Listed:
    """A row of `lockstep list`."""

    name: str
    state: State
    nodes: int
    created: str
    """ISO 8601, UTC."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Submitted:
    """`created` is False where the same job was there already."""

    name: str
    created: bool
    where: str


Mode = Literal["attach", "replace", "new"]
"""What to do about a job of the same name: attach to the same one, replace a finished one, or take a numbered name."""


Seen = Callable[[Status], None]
"""Is given each status that a wait comes by."""


def unseen(status: Status) -> None:
    """Nobody looks on."""


Lines = list[str]  # named here, because `list` is a method of every backend


class Backend(Protocol):
    """One place where jobs run. All methods raise `UserError` for a job that does not exist."""

    name: str

    def submit(self, spec: JobSpec, mode: Mode = "attach") -> Submitted:
        """Starts the job, or attaches to the same one. Raises `UserError` for another or a finished one."""

    def status(self, name: str) -> Status: ...

    def logs(self, name: str, rank: int | None = None, follow: bool = False) -> Iterator[str]:
        """Lines of one rank, or of all with `[rank 5] ` before each. Following ends with the job."""

    def wait(self, name: str, timeout: float, seen: Seen = unseen) -> Status:
        """The final status, or the one at the timeout (seconds). `seen` gets every status on the way, and the last."""

    def cancel(self, name: str) -> Status:
        """Ends the job with its grace, so that it can save. A finished one is left as it is."""

    def list(self) -> list[Listed]: ...

    def live(self, name: str) -> dict[str, Any]:
        """The spec that the job was submitted with, as plain values."""

    def drift(self, spec: JobSpec) -> Lines:
        """What somebody has changed in the submitted job since: `place: submitted → live`."""

    def summary(self, name: str) -> dict[str, Any]:
        """`summary.json` of the finished run."""


def poll(status: Callable[[], Status], timeout: float, interval: float, seen: Seen = unseen) -> Status:
    """Asks until the status is final or `timeout` seconds are over."""
    deadline = time.monotonic() + timeout
    while True:
        found = status()
        seen(found)
        left = deadline - time.monotonic()
        if found.final or left <= 0:
            return found
        time.sleep(min(interval, left))


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`name: old → new` for each place where two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}, key=str):
            found += differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return [] if old == new else [f"{prefix}: {_short(old)} → {_short(new)}"]


def missing_from(wanted: Any, live: Any, prefix: str = "") -> list[str]:
    """`place: wanted → live` for what was asked for and is otherwise; what the server added does not count."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return [
            line for key in wanted for line in missing_from(wanted[key], live.get(key), f"{prefix}.{key}".lstrip("."))
        ]
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        pairs = enumerate(zip(wanted, live))
        return [line for index, (old, new) in pairs for line in missing_from(old, new, f"{prefix}[{index}]")]
    return differences(wanted, live, prefix)


def _short(value: Any) -> str:
    text = "(default)" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def next_name(name: str, taken: set[str]) -> str:
    """`name-2`, or the first number that is free."""
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


def summary_of(backend: Backend, name: str, run_dir: str) -> dict[str, Any]:
    """`summary.json` of a run whose directory is in reach. Raises `UserError` where there is none yet."""
    path = Path(run_dir) / contract.SUMMARY_FILE
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is not there yet: {name} is {backend.status(name).state}")
    return value


GOES_ON = ("preempted", "cancelled", "timed_out")
"""Endings after which the state is saved, so that the same job submitted again goes on."""


def decide(
    name: str,
    mode: Mode,
    status: Status,
    recorded_hash: str | None,
    recorded: Callable[[], dict[str, Any]],
    spec: JobSpec,
) -> Mode:
    """What becomes of the job `name` that is there already: `replace` it, take a `new` name, or `attach` to it.

    Raises:
        UserError: it has another spec, or has finished, and no mode says what to do.
    """
    if mode == "new" or (mode == "replace" and status.final):
        return mode
    started_over = spec.fresh is not None and not status.final and recorded().get("fresh") != spec.fresh
    if recorded_hash != spec.hash() or started_over:
        raise refuse_other(name, recorded(), spec.plain())
    if status.final and status.state not in GOES_ON:
        raise refuse_finished(name, status)
    return "replace" if status.final else "attach"


def refuse_other(name: str, old: dict[str, Any], new: dict[str, Any]) -> UserError:
    changed = "; ".join(differences(old, new)[:8]) or "an earlier version of the same settings"
    return UserError(
        f"{name} exists with another spec ({changed}): choose another name, --new for a numbered one, "
        "or cancel it and submit with --replace"
    )


def refuse_finished(name: str, status: Status) -> UserError:
    why = f" ({status.reason})" if status.reason else ""
    return UserError(
        f"{name} has already finished: {status.state}{why}: "
        "--replace deletes it and submits again, --new takes a numbered name"
    )
