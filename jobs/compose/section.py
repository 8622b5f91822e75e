"""`compose:` in job.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ..spec.types import (
    Section,
    Values,
)

if TYPE_CHECKING:
    from ..spec.model import JobSpec


class Compose(Section):
    patch: Values = Field(default_factory=dict)
    """JSON merge patch on the rendered file."""


SECTION = Compose


def compose(spec: JobSpec) -> Compose:
    """The section of a spec."""
    return spec.section(Compose)
