"""pydantic's complaints as one line: which value is wrong, what was expected, and the nearest name that exists.

Knows models and the types of their fields, and nothing of files. No torch.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ValidationError
from typing_extensions import is_typeddict

Place = tuple[Any, ...]
"""Of a value among nested ones: the names of the groups that it is in, the numbers of the items, and its own."""

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_OUT_OF_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known) or 'none'}" if len(known) <= 20 else ""


def shown(value: Any) -> str:
    """A value as an error quotes it: not all of a long one."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def explain(error: ValidationError, model: type[BaseModel], prefix: str) -> tuple[Place, str]:
    """One complaint about values of `model`, and the place that it is about. The others are counted.

    `prefix` stands before each name.
    """
    complaints = error.errors(include_url=False)
    # An unknown name first: it may be why another one is missing.
    first = min(complaints, key=lambda complaint: complaint["type"] not in ("extra_forbidden", "invalid_key"))
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    return first["loc"], _sentence(dict(first), model, prefix) + more


def _sentence(first: dict[str, Any], model: type[BaseModel], prefix: str) -> str:
    error_type, place, message, value = first["type"], first["loc"], first["msg"], first["input"]
    if error_type in ("extra_forbidden", "invalid_key"):
        *groups, last = place
        near = nearest(str(last), fields(expected(model, tuple(groups))))
        return f"unknown setting {prefix + _dotted((*groups, str(last)))!r}{near}"
    if error_type == "missing" and isinstance(place[-1], int):  # in a pair
        error_type, place = "tuple_type", place[:-1]
    value = list(value) if isinstance(value, tuple) else value  # YAML has no tuples
    name, hint, got = prefix + _dotted(place), expected(model, place), f"got {shown(value)}"
    if error_type == "string_type" and place[-1] == "[key]":
        group = place[:-2]
        return f"{prefix}{_dotted(group)} must be {type_name(expected(model, group))}, {got} as a name"
    if error_type == "missing":
        return f"{name} is missing"
    if error_type == "value_error":
        message = str(first["ctx"]["error"])
        return f"{name}{' ' if message.startswith('must ') else ': ' if name else ''}{message}"
    if error_type in _OUT_OF_BOUNDS:
        return f"{name} must be {' and '.join(_limits(hint))}, {got}"
    if fields(hint):
        return f"{name} is a group of settings, {got}; known: {', '.join(fields(hint))}"
    if error_type == "string_type" and value is not None and not isinstance(value, (list, dict)):
        return f"{name} must be {type_name(hint)}, {got}: write it in quotes"
    if (
        error_type.endswith("_type")
        or error_type in ("literal_error", "finite_number")
        or typing.get_origin(bare(hint)) is tuple
    ):
        return f"{name} must be {type_name(hint)}, {got}"
    return f"{name}: {message[:1].lower()}{message[1:]}, {got}"


def _dotted(place: Place) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part != "[key]")
    return "".join(parts).removeprefix(".")


def bare(hint: Any) -> Any:
    """A type without what `Annotated` adds, and without null."""
    if typing.get_origin(hint) is Annotated:
        return bare(typing.get_args(hint)[0])
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType] if _is_union(hint) else []
    return bare(parts[0]) if len(parts) == 1 else hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def fields(hint: Any) -> dict[str, Any]:
    """Name → type of the settings in a model or a `TypedDict`; {} for any other type."""
    hint = bare(hint)
    if is_section(hint):
        return {name: field.rebuild_annotation() for name, field in hint.model_fields.items()}
    return typing.get_type_hints(hint, include_extras=True) if is_typeddict(hint) else {}


def expected(model: type[BaseModel], place: Place) -> Any:
    """The type of the value at a place in `model`; `Any` where there is none."""
    hint: Any = model
    for part in place:
        known, inner = fields(hint), typing.get_args(bare(hint))
        if known or not inner:
            hint = known.get(part, Any)
        elif part != "[key]":
            hint = inner[part if typing.get_origin(bare(hint)) is tuple else -1]
    return hint


def _limits(hint: Any) -> Iterator[str]:
    """`at least 0`, `below 1`: the bounds of a number of this type."""
    for part in typing.get_args(hint) if _is_union(hint) else [getattr(hint, "__origin__", None)]:
        if part is not None:
            yield from _limits(part)
    for added in getattr(hint, "__metadata__", ()):
        for bound in getattr(added, "metadata", [added]):
            yield from (f"{word} {getattr(bound, key)}" for key, word in _BOUNDS.items() if hasattr(bound, key))


def type_name(hint: Any) -> str:
    """A type as an error message names it."""
    if typing.get_origin(hint) is Annotated:
        return type_name(typing.get_args(hint)[0])
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if _is_union(hint):
        return " or ".join("null" if part is types.NoneType else type_name(part) for part in parts)
    if origin is Literal:
        return " | ".join(str(part) for part in parts)
    if origin is list:
        return f"a list of {type_name(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(type_name(part) for part in parts)}]"
    if origin is dict:
        return "a mapping of plain values"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "settings")
