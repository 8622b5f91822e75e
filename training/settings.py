"""From text to typed settings: strict YAML, `--set name=value`, and dataclasses checked field by field.

Knows nothing of what the settings mean; `config.py` holds the tree. Every mistake raises `UserError` with the
nearest name that exists, never a traceback. No torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from training import files
from training.contract import UserError

MAX_YAML_BYTES = 1 << 20
MAX_DIGITS = 64
"""Of a number. (YAML's 1:1:1:… in base 60 takes quadratic time; whole numbers of 4,300 digits cannot be printed.)"""
T = TypeVar("T")


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases (they can expand without bound) and without silently repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="keys must be plain names", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _number(loader: _StrictLoader, node: Any) -> Any:
    if len(node.value) > MAX_DIGITS:
        raise yaml.MarkedYAMLError(
            problem=f"a number of {len(node.value)} characters, at most {MAX_DIGITS} are read",
            problem_mark=node.start_mark,
        )
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


for _kind in ("int", "float"):
    _StrictLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


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
        raise UserError(f"{where} is not valid YAML: {_first_line(error)}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping. Raises `UserError` where it is missing, unreadable or no mapping."""
    return mapping(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a YAML file. Raises `UserError` where it is missing, unreadable, too large or not UTF-8."""
    try:
        return files.read(path, MAX_YAML_BYTES).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: {_first_line(error)}") from None


def mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping that a YAML text holds, {} for none. Raises `UserError` naming `where`."""
    value = parse_yaml(text, where)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a {type(value).__name__}, expected a mapping of settings")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error about an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; known: " + ", ".join(known) if len(known) <= 20 else ""


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's settings. Resolving them compiles every annotation anew, so it is done once."""
    return typing.get_type_hints(cls)


def build(cls: type[T], values: Mapping[str, Any], where: str, prefix: str = "") -> T:
    """An instance of the dataclass `cls` from plain values, every type checked.

    Raises:
        UserError: an unknown name, a value of the wrong type, or one that `__post_init__` refuses.
    """
    hints = _hints(typing.cast(type, cls))
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if name not in hints:
            raise UserError(f"{where}: unknown setting {full!r}{nearest(str(name), hints)}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: {full} holds settings of its own, got {_show(value)}")
            arguments[name] = build(typing.cast(type, hints[name]), value, where, f"{full}.")
        else:
            arguments[name] = _coerce(value, hints[name], full, where)
    try:
        return cls(**arguments)
    except ValueError as error:
        raise UserError(f"{where}: {prefix}{error}") from None


def override(values: dict[str, Any], cls: type, assignments: Iterable[str]) -> dict[str, Any]:
    """`values` with `name=value` texts applied: full paths (`optim.lr=0.1`) or a last part that is unique (`lr=0.1`)."""
    result = _copy(values)
    names = dict(leaves(cls))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes name=value, got {assignment!r}")
        path = _resolve(name, names)
        known = next(leaf for leaf in names if path == leaf or path.startswith(leaf + "."))
        is_text = names[known] is str and path == known
        value = text if is_text else parse_yaml(text, f"--set {name}")
        *groups, last = path.split(".")
        place = result
        for group in groups:
            inner = place.setdefault(group, {})
            if not isinstance(inner, dict):
                raise UserError(f"--set {name}: {group!r} already has the value {_show(inner)}")
            place = inner
        place[last] = value
    return result


def _resolve(name: str, names: Mapping[str, Any]) -> str:
    for leaf, hint in names.items():
        if name == leaf or (_is_mapping(hint) and name.startswith(leaf + ".") and name != leaf + "."):
            return name
    found = [leaf for leaf in names if leaf.endswith("." + name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"--set {name}: could be any of {', '.join(found)}; write the whole name")
    short = {leaf.rsplit(".", 1)[-1] for leaf in names}
    raise UserError(f"--set: unknown setting {name!r}{nearest(name, set(names) | short)}")


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below `cls` as (dotted name, type)."""
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def flatten(instance: Any, metadata: str | None = None, prefix: str = "") -> dict[str, Any]:
    """Dotted name → plain value. With `metadata`, without the fields whose metadata has that key."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(instance):
        if metadata is not None and metadata in field.metadata:
            continue
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, metadata, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def documentation(cls: type, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(dotted name, type, default, docstring) of each setting, read from the string under its field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            texts[statement.target.id] = " ".join(str(following.value.value).split()) if is_text else ""  # type: ignore[union-attr]
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from documentation(typing.cast(type, hint), f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield prefix + field.name, _name(hint), default, texts.get(field.name, "")


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _coerce(value: Any, hint: Any, name: str, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(hint)):
            return None
        if len(options) == 1:
            return _coerce(value, options[0], name, where)
        for option in options:
            try:
                return _coerce(value, option, name, where)
            except UserError:
                continue
    elif origin is Literal:
        choices = typing.get_args(hint)
        if isinstance(value, str) and value in choices:
            return value
        listed = " | ".join(str(choice) for choice in choices)
        raise UserError(f"{where}: {name} must be {listed}, got {_show(value)}")
    elif origin in (list, tuple):
        parts = typing.get_args(hint)
        if isinstance(value, (list, tuple)):
            if origin is list:
                return [_coerce(item, parts[0], f"{name}[{i}]", where) for i, item in enumerate(value)]
            if len(value) == len(parts):
                pairs = enumerate(zip(value, parts))
                return tuple(_coerce(item, part, f"{name}[{i}]", where) for i, (item, part) in pairs)
    elif _is_mapping(hint):
        if isinstance(value, Mapping) and _is_plain(value):
            return _copy(dict(value))
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
            return value
    elif hint is float:
        number = _as_float(value)
        if number is not None:
            return number
    elif hint is str and isinstance(value, str):
        return value
    raise UserError(f"{where}: {name} must be {_name(hint)}, got {_show(value)}")


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON and YAML unchanged: text, finite numbers, booleans, null, lists and mappings."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 2**63)


def _as_float(value: Any) -> float | None:
    """A finite float. YAML 1.1 reads `1e-3` as text, so text that is a number passes."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _name(hint: Any) -> str:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _name(part) for part in parts)
    if origin is Literal:
        return " | ".join(str(part) for part in parts)
    if origin is list:
        return f"a list of {_name(parts[0])}"
    if origin is tuple:
        return f"[{', '.join(_name(part) for part in parts)}]"
    if origin is dict:
        return "a mapping of plain values"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
