"""One line of what `lockstep doctor` reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Result = Literal["ok", "note", "missing", "warning", "cannot tell"]
"""`note`: no job needs it. `cannot tell`: the rights to look are not there."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    result: Result
    detail: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)
