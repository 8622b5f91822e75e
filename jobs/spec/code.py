"""`code:` in job.yaml: a folder of one's own that travels with the job."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from lockstep.jobs.spec.section import Section
from lockstep.jobs.spec.types import Text

REQUIREMENTS = (
    "requirements is not a setting: put packages into your own image, with three lines in a Dockerfile below `FROM lockstep:cpu`: "
    "`USER 0`, `RUN pip install --no-cache-dir NAME`, `USER 1000:0` (docs/containers.md)"
)
CODE_PARTS = "/lockstep/code"
"""Where a container finds the archive of the job's code, in pieces."""


class Code(Section):
    path: Text = Field(default=".", min_length=1, max_length=1024)
    """The folder, seen from the job file's; where there is no file, from the current one."""
    allow: list[Text] = Field(default_factory=list, max_length=1000)
    """Files in it that look like a secret, but are not."""
    hash: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Identity of the code, which submit finds. One that is given names a copy that this machine keeps still."""
    packed: int = Field(default=0, ge=0)
    """Bytes of its archive, which submit finds, too."""

    @model_validator(mode="before")
    @classmethod
    def _packages(cls, values: Any) -> Any:
        refuse_requirements(values)
        return values


def refuse_requirements(values: Any) -> None:
    """Raises `ValueError` where somebody wants packages installed at the start of the job."""
    if isinstance(values, dict) and "requirements" in values:
        raise ValueError(REQUIREMENTS)


def _folder(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _or_text(schema: dict[str, Any]) -> None:
    schema["anyOf"].insert(0, {"type": "string"})


CodeOrNone = Annotated[Code | None, BeforeValidator(_folder), Field(json_schema_extra=_or_text)]
"""`code: .` is `code: {path: .}`."""
