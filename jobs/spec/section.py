"""What every group of settings in job.yaml is: as those of a recipe, and frozen."""

from __future__ import annotations

from pydantic import ConfigDict

from lockstep.training.config import settings


class Section(settings.Section):
    model_config = ConfigDict(frozen=True)
