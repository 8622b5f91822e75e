"""The server's validation of an object, before admission: unknown fields (strict), types, names, labels."""

from __future__ import annotations

import copy
import json
import re
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
    schema = copy.deepcopy(crd(kind)["openAPIV3Schema"])
    _strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}  # the API machinery defines it
    return jsonschema.Draft202012Validator(schema)


def unknown_fields(errors: list[jsonschema.ValidationError]) -> list[str]:
    return [
        f"{_path(error)}.{name}"
        for error in errors
        if error.validator == "additionalProperties"
        for name in error.instance
        if name not in error.schema["properties"]
    ]


def _path(error: jsonschema.ValidationError) -> str:
    return ".".join(str(part) for part in error.absolute_path)


def causes(item: Object, errors: list[jsonschema.ValidationError]) -> list[str]:
    """Returns the reasons why an object is invalid."""
    meta = item["metadata"]
    labels = (meta.get("labels") or {}).values()
    wrong = [("metadata.labels", value) for value in labels if len(value) > 63 or not re.fullmatch(LABEL, value)]
    wrong += [] if re.fullmatch(NAME, meta["name"]) else [("metadata.name", meta["name"])]
    messages = [f'{field}: Invalid value: "{value}"' for field, value in wrong]
    for error in errors:
        problem = f"must be of type {error.validator_value}" if error.validator == "type" else error.message[:200]
        messages.append(f"{_path(error)}: Invalid value: {problem}")
    return messages
