"""Manifests as data: names, merge patches, and YAML that every parser reads alike."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from lockstep.training.contract import UserError

JOB = "lockstep/job"
"""Label of everything that belongs to a job; its value is the job's name."""
HASH = "lockstep/spec-hash"
SPEC = "lockstep/spec"
"""Annotation that holds the spec that a job was made from, whole. It has references to secrets, no secrets."""
MANAGED = {"app.kubernetes.io/managed-by": "lockstep"}

Manifest = dict[str, Any]

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "inf", "nan"}


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 could read as something else (`1e3`, `0o7`, `y`)."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature of yaml
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[Manifest]) -> str:
    """Returns YAML documents, in order, ending in a newline."""
    documents = [yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True) for item in objects]
    return "---\n".join(documents)


def merge(target: Any, patch: Any, keys: Sequence[str] = ()) -> Any:
    """Applies a JSON merge patch (RFC 7386): null removes, mappings merge, any other value replaces.

    Args:
        keys: lists whose items all have one of these keys merge by it, as in kubectl's strategic merge.
    """
    if isinstance(patch, list) and isinstance(target, list):
        return _merge_lists(target, patch, keys)
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value, keys)
    return result


def _merge_lists(target: list[Any], patch: list[Any], keys: Sequence[str]) -> list[Any]:
    items = [*target, *patch]
    key = next((key for key in keys if all(isinstance(item, dict) and key in item for item in items)), None)
    if key is None:
        return patch
    if wrong := [item[key] for item in items if not isinstance(item[key], (str, int))]:
        raise UserError(f"patch: the {key} of a list's item must be a text or a number, got {str(wrong[0])[:60]}")
    result = {item[key]: item for item in target}
    for item in patch:
        result[item[key]] = merge(result.get(item[key]), item, keys)
    return list(result.values())


def without_none(value: Manifest) -> Manifest:
    """Returns the mapping without keys that are None; nested values stay unchanged."""
    return {key: inner for key, inner in value.items() if inner is not None}


def get(value: Any, *path: str | int) -> Any:
    """Returns the value at `path`; None if a value on the way is neither a mapping nor a list."""
    for part in path:
        if isinstance(value, dict) and isinstance(part, str):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def spec_text(record: Manifest) -> str:
    """Returns the record of a spec as the text that `spec_in` reads."""
    return json.dumps(record, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def spec_in(labels: Any) -> Manifest:
    """Returns the spec that a job's annotations (or labels) hold, as plain values; {} if the spec is missing or damaged."""
    try:
        value = json.loads(get(labels, SPEC) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[Manifest]:
    """Returns the mappings in a list; [] if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def seconds_of(stamp: object) -> float | None:
    """Returns an RFC 3339 time in seconds since the epoch; None if `stamp` is no time."""
    try:
        return datetime.datetime.fromisoformat(str(stamp).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


def size_in_bytes(text: str) -> int:
    """Returns the bytes of a size: `32Gi` → 34359738368."""
    return int(text[:-2]) << 10 * (1 + ("Ki", "Mi", "Gi", "Ti").index(text[-2:]))


def seconds(text: str) -> int:
    """Returns the seconds of a duration: `1h30m` → 5400."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))


def holds(mount: str, path: str) -> bool:
    """Returns whether `path` lies on the mount at `mount`."""
    return path == mount or path.startswith(mount.rstrip("/") + "/")


class Change(NamedTuple):
    """A place where two objects differ: a rendered one and a patched one, or two specs."""

    path: str
    """Keys with dots between them; items of a list by their name: `spec.containers[pytorch].env`."""
    before: Any
    value: Any
    """Later value; None: the key was removed."""
    ours: bool
    """Whether an earlier value was changed or removed. Every value inside an addition is a separate change."""

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.before)} → {_short(self.value)}"


def changes(before: Any, after: Any, path: str = "") -> Iterator[Change]:
    """Yields the changes between two objects, in order. Lists are compared by their items' names, or may grow at their end."""
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = before, after
    elif isinstance(before, list) and isinstance(after, list):
        old, new = _named(before), _named(after)
        if before and not old:
            old, new = dict(enumerate(before)), dict(enumerate(after))
        elif before and not new:  # two items have the same name; the later one counts
            yield Change(path, before, after, True)
            return
        new = new or dict(enumerate(after))
    else:
        if type(before) is not type(after) or before != after:
            yield Change(path, before, after, True)
        return
    for key in {**old, **new}:
        place = f"{path}[{key}]" if isinstance(before, list) else f"{path}.{key}" if path else str(key)
        if key not in new:
            yield Change(place, old[key], None, True)
        elif key in old:
            yield from changes(old[key], new[key], place)
        elif new[key] and isinstance(new[key], (dict, list)):
            yield from changes(type(new[key])(), new[key], place)
        elif new[key] is not None:
            yield Change(place, None, new[key], False)


def _named(items: list[Any]) -> dict[Any, Any]:
    """Returns a list's items by their unique names; {} if an item has no name or a name occurs twice."""
    names = [item.get("mountPath", item.get("name")) if isinstance(item, dict) else None for item in items]
    named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    return dict(zip(names, items)) if named else {}


def _short(value: Any) -> str:
    text = "(default)" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
