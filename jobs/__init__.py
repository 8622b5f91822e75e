"""Jobs from Python:

from lockstep import JobSpec, submit

job = submit(JobSpec.load("job.yaml"), backend="local")
print(job.wait(timeout=3600).state, job.summary())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if __name__ != "lockstep.jobs":  # else each class would exist twice
    raise ImportError(f"the package {__name__} is imported as lockstep.jobs: from lockstep import JobSpec, submit")

if TYPE_CHECKING:
    from .job import Job, submit
    from .spec.model import JobSpec

__all__ = ["Job", "JobSpec", "submit"]


def __getattr__(name: str) -> Any:
    # The command line imports this package for every command; only commands that need pydantic import it.
    if name == "JobSpec":
        from .spec.model import JobSpec

        return JobSpec
    if name in ("Job", "submit"):
        from . import job as driver

        return getattr(driver, name)
    raise AttributeError(f"module 'lockstep.jobs' has no attribute {name!r}")
