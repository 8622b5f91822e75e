"""From job.yaml to a JobSpec."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from lockstep.training.config import settings

M = TypeVar("M", bound=BaseModel)


def load(model: type[M], path: Path, assignments: dict[str, Any], below: dict[str, Any]) -> tuple[M, str]:
    """Reads, applies `assignments` (dotted names), checks. What stands in `below` counts where the file is silent.

    Returns:
        The spec, and where its recipe stands.

    Raises:
        UserError: with the line of the mistake.
    """
    text = settings.read_text(path)
    values = settings.mapping(text, str(path))
    for name in values:
        if values[name] is None:  # a heading with nothing but comments below it
            values[name] = settings.empty(model, name)
    values = _over(below, values)
    for name, value in assignments.items():
        place(values, name, value)
    lines = settings.lines_of(text)
    found = settings.build(model, values, f"{path} with its profile" if below else str(path), lines=lines)
    at = lines.get(("overrides",)) or lines.get(("recipe",))
    return found, f"{path}, line {at}" if at else str(path)


def _over(below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` over `below`. null takes away a value that stands below; where none does, it is one: a patch removes with it."""
    result = dict(below)
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            result[name] = _over(below[name], value)
        elif value is None and below.get(name) is not None:
            del result[name]
        else:
            result[name] = value
    return result


def place(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted name in nested plain values. Raises `UserError` where a part of it is not a mapping."""
    group, _, override = name.partition(".")
    is_override = group == "overrides" and override  # which has a dotted name of its own
    settings.put(values, [group, override] if is_override else name.split("."), value)
