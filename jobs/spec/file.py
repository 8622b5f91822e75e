"""From job.yaml to a JobSpec, and from pydantic's errors to one line that names the place and the nearest name."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from jobs.manifest import merge
from training import settings
from training.contract import UserError

M = TypeVar("M", bound=BaseModel)


def load(model: type[M], path: Path, assignments: dict[str, Any], below: dict[str, Any]) -> tuple[M, str]:
    """Reads, applies `assignments` (dotted names), checks. What stands in `below` counts where the file is silent.

    Returns:
        The spec, and where its recipe stands.

    Raises:
        UserError: with the line of the mistake.
    """
    text = settings.read_text(path)
    values = merge(below, settings.mapping(text, str(path)))
    for name, value in assignments.items():
        place(values, name, value)
    lines = _lines(text)
    found = validate(model, values, str(path), lines)
    at = lines.get(("overrides",)) or lines.get(("recipe",))
    return found, f"{path}, line {at}" if at else str(path)


def validate(
    model: type[M], values: dict[str, Any], where: str, lines: dict[tuple[Any, ...], int] | None = None
) -> M:  # fmt: skip
    """The object of plain values. Raises `UserError` naming `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise explain(error, model, where, lines) from None


def place(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted name in nested plain values. Raises `UserError` where a part of it is no mapping."""
    *groups, last = name.split(".")
    if groups[:1] == ["overrides"]:
        groups, last = ["overrides"], name.partition(".")[2]
    for group in groups:
        inner = values.setdefault(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"{name}: {group} has a value of its own, not settings below it")
        values = inner
    values[last] = value


def explain(
    error: ValidationError, model: type[BaseModel], where: str, lines: dict[tuple[Any, ...], int] | None = None
) -> UserError:
    """pydantic's first complaint as one line; the rest is counted."""
    complaints = error.errors(include_url=False)
    first = complaints[0]
    place = tuple(first["loc"])
    name = ".".join(str(part) for part in place if part != "[key]")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = (
            f"unknown setting {_clean(str(place[-1]))!r}{settings.nearest(str(place[-1]), _fields(model, place[:-1]))}"
        )
        name = ".".join(str(part) for part in place[:-1])
    elif first["type"] == "missing":
        message = "is missing"
    elif first["type"] == "string_type":
        message = f"must be text, got {_clean(repr(first['input'])[:60])}: write it in quotes"
    elif "input" in first and first["type"] != "value_error":
        message = f"{message[:1].lower()}{message[1:]}, got {_clean(repr(first['input'])[:60])}"
    line = next((lines[place[:n]] for n in range(len(place), 0, -1) if place[:n] in lines), None) if lines else None
    at = f"{where}, line {line}" if line else where
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return UserError(f"{at}: {_clean(name)}{': ' if name else ''}{message}{more}")


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def _fields(model: type[BaseModel], place: tuple[Any, ...]) -> list[str]:
    """Names of the settings at `place`."""
    current: Any = model
    for part in place:
        if (
            isinstance(part, str)
            and isinstance(current, type)
            and issubclass(current, BaseModel)
            and part in current.model_fields
        ):
            current = _model_in(current.model_fields[part].annotation)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _model_in(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint
    return next((found for part in reversed(typing.get_args(hint)) if (found := _model_in(part)) is not None), None)


def _lines(text: str) -> dict[tuple[Any, ...], int]:
    """Line of each setting, by its place. The text is known to be sound YAML without aliases."""
    lines: dict[tuple[Any, ...], int] = {}

    def walk(node: yaml.Node, place: tuple[Any, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[(*place, key.value)] = key.start_mark.line + 1
                walk(value, (*place, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*place, index)] = value.start_mark.line + 1
                walk(value, (*place, index))

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        walk(root, ())
    return lines
