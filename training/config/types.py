"""The types of settings: numbers as people write them in YAML, with what bounds them."""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, PlainValidator, WithJsonSchema

from lockstep.training.config.settings import shown


class Mark(enum.Enum):
    """What holds of a setting between two starts of one run. All others are part of the run's identity."""

    FREE = "may change"


T = TypeVar("T")
Free = Annotated[T, Mark.FREE]


def _number(value: Any) -> Any:
    """YAML 1.1 reads `1e-3` as text, so text that is a number passes."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _fits(value: int) -> int:
    if abs(value) >= 2**63:
        raise ValueError(f"must be a whole number below 2**63, got {value}")
    return value


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    if not _is_plain(value):
        raise ValueError(f"must be a mapping of plain values, got {shown(value)}")
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON and YAML unchanged: text, finite numbers, booleans, null, lists and mappings."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 2**63)


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    epochs = [float(epoch) for epoch, _ in points]
    if any(b <= a for a, b in itertools.pairwise(epochs)):
        raise ValueError(f"must have increasing epochs, got {epochs}")
    return points


def _seconds_or_auto(value: Any) -> Any:
    number = _number(value)
    if number == "auto":
        return number
    try:
        known = isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
    except OverflowError:  # a whole number of more than 308 digits
        known = False
    if not known:
        raise ValueError(f"must be a number or auto, got {shown(value)}")
    if number < 0:
        raise ValueError(f"must be at least 0, got {shown(value)}")
    return float(number)


LOGGED = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
"""A name under which a script logs numbers."""
_BETTER = {"accuracy": "max", "test_loss": "min"}


def _keep_best(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(
            f"must be true, false, or one name with max or min, such as {{val_loss: min}}, got {shown(value)}"
        )
    name, better = next(iter(value.items()))
    if not isinstance(name, str) or not re.fullmatch(LOGGED, name):
        raise ValueError(f"must name a number that is logged (letters, digits and _, at most 64), got {shown(name)}")
    if better not in ("max", "min"):
        raise ValueError(
            f"must say whether {name} is better where it is higher (max) or lower (min), got {shown(better)}"
        )
    if better != _BETTER.get(name, better):
        raise ValueError(f"must be {{{name}: {_BETTER[name]}}}, got {{{name}: {better}}}, which keeps the worst")
    return value


KeepBest = Annotated[
    bool | dict[str, Literal["max", "min"]], PlainValidator(_keep_best),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "boolean"},
                {
                    "type": "object", "propertyNames": {"pattern": f"^{LOGGED}$"}, "minProperties": 1, "maxProperties": 1,
                    "additionalProperties": {"enum": ["max", "min"]},
                },
            ]
        }
    ),
]  # fmt: skip
Number = Annotated[FiniteFloat, BeforeValidator(_number)]
SecondsOrAuto = Annotated[
    float | Literal["auto"], PlainValidator(_seconds_or_auto),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto", "type": "string"}]}),
]  # fmt: skip
PositiveNumber = Annotated[FiniteFloat, Field(gt=0), BeforeValidator(_number)]
Rate = Annotated[FiniteFloat, Field(ge=0, lt=1_000_000_000), BeforeValidator(_number)]
Momentum = Annotated[FiniteFloat, Field(ge=0, le=1), BeforeValidator(_number)]
Count = Annotated[int, Field(ge=0), AfterValidator(_fits)]
Positive = Annotated[int, Field(ge=1), AfterValidator(_fits)]
Plain = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Settings of something that this package does not know: they go into run.yaml and into the hash."""
Items = Annotated[list[T], BeforeValidator(lambda value: list(value) if isinstance(value, tuple) else value)]
Pair = Annotated[tuple[T, T], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
Schedule = Annotated[Items[T], AfterValidator(_rising)]
"""Of points (when, factor)."""
