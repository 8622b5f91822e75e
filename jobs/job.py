"""A submitted job as an object: `lockstep submit`, `status`, `logs`, `wait` and `cancel` from Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.training import extras

from .backend import Backend, Mode, backend_of
from .spec.model import JobSpec
from .status import Status, StatusCallback


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job. `submit` returns one; a job that was submitted elsewhere is `Job(name, backend)`.

    Its methods raise `UserError` where the backend has no job of that name.
    """

    name: str
    backend: Backend

    def status(self) -> Status:
        """Returns the state of the job, and the reason.

        Examples:
            >>> job.status().state
            'succeeded'
        """
        return self.backend.status(self.name)

    def logs(self, rank: int | None = None, follow: bool = False, last: int | None = None) -> Iterator[str]:
        """Yields the lines of one rank, or of all ranks with `[rank 5] ` before each line.

        Args:
            follow: whether to wait for new lines until the job ends.
            last: begin this many lines before the end of each log.

        Examples:
            >>> lines = list(job.logs(rank=0, last=20))
        """
        return self.backend.logs(self.name, rank, follow, last)

    def execute(self, command: list[str], rank: int = 0) -> int:
        """Runs a command on the node of a running job's rank, with this process's streams. Returns the command's exit code.

        Examples:
            >>> job.execute(["sh", "-c", "test $RANK = 1"], rank=1)
            0
        """
        return self.backend.execute(self.name, command, rank)

    def wait(self, timeout: float = 86400, seen: StatusCallback | None = None) -> Status:
        """Waits for the end. Returns the final status, or the current one after `timeout` seconds.

        Args:
            seen: callback that gets every status during the wait.

        Examples:
            >>> seen = []
            >>> job.wait(timeout=3600, seen=seen.append).state
            'succeeded'
        """
        return self.backend.wait(self.name, timeout, seen)

    def cancel(self) -> Status:
        """Ends the job, with its grace period to save. A job that has ended stays unchanged.

        Examples:
            >>> job.cancel().state
            'cancelled'
        """
        return self.backend.cancel(self.name)

    def summary(self) -> dict[str, Any]:
        """Returns `summary.json` of the finished run. Raises `UserError` if the run has not written one yet.

        Examples:
            >>> accuracy = job.summary()["accuracy"]
        """
        return self.backend.summary(self.name)


@extras.explained()
def submit(spec: JobSpec, backend: str | Backend = "local", mode: Mode = "attach") -> Job:
    """Submits a job, or attaches to the same one.

    Args:
        backend: `"local"`, `"compose"`, `"k8s"`, `"slurm"`, or a backend as an object.
        mode: if a job of that name has ended: `"attach"` refuses, `"replace"` submits it again.

    Raises:
        UserError: lint errors, a name in use, no answer from the cluster.

    Examples:
        >>> job = submit(JobSpec.load("job.yaml"), backend="local")
        >>> job.wait(timeout=3600).state
        'succeeded'
    """
    spec.check_training(spec.name)
    opened = backend_of(backend).at(spec) if isinstance(backend, str) else backend
    return Job(opened.submit(spec, mode).name, opened)
