"""From text to typed settings: strict YAML, `--set NAME=VALUE`, short names, and the import of what a setting names.

Recipes (`lockstep.training.config`) and jobs (`lockstep.jobs.spec`) are read by these same functions, which know nothing of what a setting
means. Every mistake raises `UserError`: the setting's name, what pydantic says of its value, and the nearest name that exists. No torch.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from .. import files
from ..contract import UserError, first_line

MAX_YAML_BYTES = 1 << 20
MAX_COMPLAINTS = 5
"""The most complaints that one error names."""


class Section(BaseModel):
    """A group of settings: strict types, no unknown names, documented by the text under each field."""

    model_config = ConfigDict(
        extra="forbid", strict=True, protected_namespaces=(),
        defer_build=True,  # most sections are only ever read as a part of the whole
    )  # fmt: skip


M = TypeVar("M", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases (they can expand without bound) and without silently repeated keys."""

    def fetch_alias(self) -> None:
        raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=self.get_mark())

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _integer(loader: _StrictLoader, node: Any) -> Any:
    if len(node.value) > 64:  # 1:1:1… is a number to the base 60, whose value takes minutes
        raise yaml.MarkedYAMLError(problem=f"a number of {len(node.value)} characters", problem_mark=node.start_mark)
    return loader.construct_yaml_int(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, where: str) -> Any:
    """Parses one YAML document. Raises `UserError` naming `where` and the line."""
    if len(text) > MAX_YAML_BYTES:
        raise UserError(f"{where} has {len(text)} characters; at most {MAX_YAML_BYTES} are read")
    try:
        return yaml.load(text, _StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}{line}: {error.problem or 'not valid YAML'}") from None
    except Exception as error:  # noqa: BLE001 - `!!bool x` and the like make the parser raise nearly anything
        raise UserError(f"{where} is not valid YAML: {first_line(error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, {} for none. Raises `UserError` where it is missing, unreadable or no mapping."""
    value = parse_yaml(read_text(path), str(path))
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected a mapping of settings")
    return value or {}


def read_text(path: Path) -> str:
    """The text of a YAML file. Raises `UserError` where it is missing, unreadable, too large or not UTF-8."""
    with files.reading(path):
        return files.read(path, MAX_YAML_BYTES).decode("utf-8")


def build(model: type[M], values: Mapping[str, Any], where: str, prefix: str = "") -> M:
    """An instance of `model` from plain values, every one checked. `prefix` stands before each name in an error.

    Raises:
        UserError: an unknown name, a value of the wrong type, or one that the model refuses.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {'; '.join(explain(error, model, prefix))}") from None


def override(values: dict[str, Any], model: type[BaseModel], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of `values` with the NAME=VALUE texts of `--set` applied. Raises `UserError`."""
    result = copy.deepcopy(values)
    for name, value in assignments(model, overrides):
        put(result, name.split("."), value)
    return result


def assignments(model: type[BaseModel], overrides: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each NAME=VALUE. NAME is a full one (`optim.lr`), a last part that is unique (`lr`), or one
    within a mapping (`model_options.width`). Text that is always text is taken as it stands, all else is YAML.

    Raises:
        UserError: an entry that has no such form, an unknown name, or a value that is not valid YAML.
    """
    names: dict[str, Any] = {}
    for entry in overrides:
        name, equals, text = entry.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes NAME=VALUE, got {entry!r}")
        names = names or {leaf: field.annotation for leaf, field in leaves(model)}
        full = _resolve(name, names)
        yield full, text if names.get(full) is str else parse_yaml(text, f"--set {name}")


def _resolve(name: str, names: Mapping[str, Any]) -> str:
    for leaf, hint in names.items():
        is_mapping = typing.get_origin(bare(hint)) is dict
        if name == leaf or (is_mapping and name.startswith(leaf + ".") and name != leaf + "."):
            return name
    matches = [leaf for leaf in names if leaf.endswith("." + name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"--set {name}: could be any of {', '.join(matches)}; write the whole name")
    short = {leaf.rsplit(".", 1)[-1] for leaf in names}
    raise UserError(f"--set: unknown setting {name!r}{nearest(name, set(names) | short)}")


def put(values: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Sets one of nested plain values. Raises `UserError` where one on the way is not a mapping."""
    *groups, last = parts
    for group in groups:
        inner = values.setdefault(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"--set {'.'.join(parts)}: {group!r} already has the value {shown(inner)}")
        values = inner
    values[last] = value


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below `model` as (dotted name, field). A section that may be null is one, and so are its own."""
    for name, field in model.model_fields.items():
        inner = bare(field.annotation)
        if not is_section(field.annotation):
            yield prefix + name, field
        if is_section(inner):
            yield from leaves(inner, f"{prefix}{name}.")


def flatten(section: BaseModel, without: object = None) -> dict[str, Any]:
    """Dotted name → value. With `without`, not those of the fields that are annotated with it."""
    names = (name for name, field in leaves(type(section)) if without not in field.metadata)
    return {name: attrgetter(name)(section) for name in names}


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown name."""
    known = sorted(known)
    short = f"{name[:1]}{len(name) - 2}{name[-1:]}"  # as k8s is kubernetes
    close = [short] if short in known else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known) or 'none'}" if len(known) <= 20 else ""


def written(value: Any, otherwise: Callable[[Any], str] = repr) -> str:
    """A value as a settings file has it: null, true and false, and all else as `otherwise` writes it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else otherwise(value)


def shown(value: Any) -> str:
    """A value as an error quotes it: not all of a long one."""
    text = written(value)
    return text if len(text) <= 60 else text[:57] + "..."


def explain(error: ValidationError, model: type[BaseModel], prefix: str) -> list[str]:
    """Returns the complaints about values of `model`. Beyond `MAX_COMPLAINTS` they are counted. `prefix` stands before each name."""
    hints = {name: field.annotation for name, field in leaves(model)}
    unknown = ("extra_forbidden", "invalid_key")
    # An unknown name first: it may be why another one is missing.
    complaints = sorted(error.errors(include_url=False), key=lambda one: one["type"] not in unknown)
    texts = []
    for one in complaints[:MAX_COMPLAINTS]:
        kind, message, path = one["type"], one["msg"].removeprefix("Value error, "), list(one["loc"])
        cuts = (end for end in range(1, len(path)) if _is_union(bare(hints.get(".".join(map(str, path[:end]))))))
        # Without pydantic's names for the members of a union.
        name = prefix + ".".join(map(str, path[: next(cuts, None)]))
        if kind in unknown:
            known = {part for leaf in hints for part in leaf.split(".")}
            texts.append(f"unknown setting {name!r}{nearest(str(path[-1]), known)}")
            continue
        message = re.sub(r"^\w+ should", "must", message)
        got = "" if kind in ("missing", "value_error") else f", got {shown(one['input'])}"
        texts.append(f"{name}{' ' if message.startswith('must ') else ': ' if name else ''}{message}{got}")
    more = len(complaints) - MAX_COMPLAINTS
    return [*dict.fromkeys(texts), *([f"and {more} more"] if more > 0 else [])]


def bare(hint: Any) -> Any:
    """A type without what `Annotated` adds, and without null."""
    hint = _plain(hint)
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType] if _is_union(hint) else []
    return bare(parts[0]) if len(parts) == 1 else hint


def _plain(hint: Any) -> Any:
    """Returns a type without what `Annotated` adds."""
    return _plain(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else hint


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def type_name(hint: Any) -> str:
    """Returns the name of a type, for people."""
    hint = _plain(hint)
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
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
    return names.get(hint, "settings")


def imported(name: str, kind: str) -> Any:
    """Returns the object of that name, from the working directory or an installed package.

    Raises:
        UserError: the import fails. `kind` describes the object in the message.
    """
    module, _, member = name.partition(":")
    add_working_directory()
    try:
        return getattr(importlib.import_module(module), member)
    except (ImportError, AttributeError, ValueError, TypeError, OSError, RuntimeError) as error:
        raise UserError(f"cannot import {kind} {name}: {error}") from None


def add_working_directory() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # `-m lockstep.training` has it, a console script has not


def check_options(options: Iterable[str], function: Callable[..., Any], name: str) -> None:
    """Raises `UserError` for an option that is no parameter of the function."""
    parameters = inspect.signature(function).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not free:
            raise UserError(f"{name} has no option {option!r}{nearest(option, parameters)}")
