"""Drivers of one's own that were written for an earlier version import this."""

from __future__ import annotations

from lockstep.jobs.slurm.backend import training_task

__all__ = ["training_task"]
