"""A submitted job as an object: what `lockstep submit`, `status`, `logs`, `wait` and `cancel` do, from Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.jobs import registry
from lockstep.jobs.backend import Backend, Mode
from lockstep.jobs.spec.model import JobSpec
from lockstep.jobs.status import Observer, Status
from lockstep.training import extras


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a backend."""

    name: str
    backend: Backend

    def status(self) -> Status:
        return self.backend.status(self.name)

    def logs(self, rank: int | None = None, follow: bool = False, last: int | None = None) -> Iterator[str]:
        return self.backend.logs(self.name, rank, follow, last)

    def execute(self, command: list[str], rank: int = 0) -> int:
        """Runs a command beside a rank, with this process's streams. Returns the command's exit code."""
        return self.backend.execute(self.name, command, rank)

    def wait(self, timeout: float = 86400, seen: Observer | None = None) -> Status:
        """Waits for the end. Returns the final status, or the current one after `timeout` seconds. `seen` is called with every status."""
        return self.backend.wait(self.name, timeout, seen)

    def cancel(self) -> Status:
        return self.backend.cancel(self.name)

    def summary(self) -> dict[str, Any]:
        """`summary.json` of the finished run. Raises `UserError` where there is none yet."""
        return self.backend.summary(self.name)


@extras.explained()
def submit(spec: JobSpec, backend: str | Backend = "local", mode: Mode = "attach") -> Job:
    """Submits the job, or attaches to the same one. Raises `UserError`: lint errors, a name in use, no answer from the cluster."""
    spec.check_training(spec.name)
    opened = registry.backend(backend).at(spec) if isinstance(backend, str) else backend
    return Job(opened.submit(spec, mode).name, opened)
