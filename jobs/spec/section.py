"""What every group of settings in job.yaml is: strict, frozen, documented by the text under each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    EARLIER: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    """Version of stored specs → the defaults up to it that are others today. A stored spec without them was made with them."""

    @classmethod
    def as_stored(cls, values: Any, version: int) -> Any:
        """The settings of this section in a spec that was stored in an earlier version, with the defaults of then."""
        if not isinstance(values, dict):
            return values
        then = [defaults for last, defaults in sorted(cls.EARLIER.items(), reverse=True) if version <= last]
        return {name: value for defaults in then for name, value in defaults.items()} | values
