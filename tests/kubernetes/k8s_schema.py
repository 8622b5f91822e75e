"""What a server refuses of an object before it asks anybody: unknown fields (strict validation), types, names, labels."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

Object = dict[str, Any]
CUSTOM = ("pytorchjobs", "trainjobs")
"""Kinds that have a schema here."""
NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
LABEL = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"


@cache
def crd(kind: str) -> Object:
    return json.loads((Path(__file__).parent / "crds" / f"{kind.lower()}.json").read_text())


def _strict(node: Any) -> None:
    for item in node if isinstance(node, list) else node.values() if isinstance(node, dict) else ():
        _strict(item)
    if isinstance(node, dict):
        if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
            node.setdefault("additionalProperties", False)
        if node.get("x-kubernetes-int-or-string"):
            node.pop("type", None)
            node["anyOf"] = [{"type": "integer"}, {"type": "string"}]


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The CRD's schema with unknown fields forbidden, as the API server treats them under strict validation."""
    found = copy.deepcopy(crd(kind)["openAPIV3Schema"])
    _strict(found)
    found["properties"]["metadata"] = {"type": "object"}  # the API machinery's own
    return jsonschema.Draft202012Validator(found)


def unknown_fields(errors: list[jsonschema.ValidationError]) -> list[str]:
    return [
        ".".join([*_path(error), name])
        for error in errors
        if error.validator == "additionalProperties"
        for name in error.instance
        if name not in error.schema["properties"]
    ]


def _path(error: jsonschema.ValidationError) -> list[str]:
    return [str(part) for part in error.absolute_path]


def causes(item: Object, errors: list[jsonschema.ValidationError]) -> Iterator[Object]:
    """Why an object is invalid, as `details` lists it."""
    meta = item["metadata"]
    if not re.fullmatch(NAME, meta["name"]):
        yield _cause(
            "metadata.name", f'Invalid value: "{meta["name"]}": a lowercase RFC 1123 subdomain must consist of …'
        )
    for value in (meta.get("labels") or {}).values():
        if len(value) > 63 or not re.fullmatch(LABEL, value):
            yield _cause("metadata.labels", f'Invalid value: "{value}": a valid label must be an empty string or …')
    for error in errors:
        field = ".".join(_path(error))
        if error.validator == "type":
            got = {str: "string", int: "integer", list: "array", dict: "object"}.get(type(error.instance), "boolean")
            said = f'Invalid value: "{got}": {field} in body must be of type {error.validator_value}: "{got}"'
            yield _cause(field, said, "FieldValueTypeInvalid")
            if field.endswith(".Worker.replicas"):  # which is also what `kubectl scale` reads
                yield _cause(f".{field}", f"Invalid value: 0: .{field} accessor error: it is of the type {got}")
        else:
            yield _cause(field, f"Invalid value: {error.message[:200]}")
    if errors:
        yield _cause(
            "<nil>", "Invalid value: null: some validation rules were not checked because the object was invalid"
        )


def _cause(field: str, message: str, reason: str = "FieldValueInvalid") -> Object:
    return {"reason": reason, "message": message, "field": field}
