"""Jobs that an earlier version has queued name their payload by this place when a node unpickles it."""

from __future__ import annotations

from lockstep.jobs.slurm.task import TrainingTask

__all__ = ["TrainingTask"]
