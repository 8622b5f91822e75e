"""What every group of settings in job.yaml is: as those of a recipe, and frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict

from lockstep.training.config import settings


class Section(settings.Section):
    model_config = ConfigDict(frozen=True)

    EARLIER: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    """Version of stored specs → the defaults up to it that are others today. A stored spec without them was made with them."""

    @classmethod
    def as_stored(cls, values: Any, version: int) -> Any:
        """The settings of this section in a spec that was stored in an earlier version, with the defaults of then."""
        if not isinstance(values, dict):
            return values
        then = [defaults for last, defaults in sorted(cls.EARLIER.items(), reverse=True) if version <= last]
        return {name: value for defaults in then for name, value in defaults.items()} | values
