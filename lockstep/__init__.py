"""`from lockstep import Session`: your own training loop with what Lockstep promises (docs/own-training.md).

Importing the package loads nothing. In a rank it loads little, and from then on the rank keeps signals for its
`Session`. torch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.jobs import Job as Job
    from lockstep.jobs import JobSpec as JobSpec
    from lockstep.jobs import submit as submit
    from lockstep.training.session import Session as Session
    from lockstep.wire.submitit_api import resumable as resumable

if "LOCKSTEP_LAUNCHER" in os.environ:  # what a script imports next may take long
    from lockstep.wire import signals

    signals.keep_for_session(os.environ)

__all__ = ["Job", "JobSpec", "Session", "resumable", "submit"]
_PLACES = {
    "Session": "lockstep.training.session",
    "Job": "lockstep.jobs",
    "JobSpec": "lockstep.jobs",
    "submit": "lockstep.jobs",
    "resumable": "lockstep.wire.submitit_api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
