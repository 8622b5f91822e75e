"""Requests that a server refuses before it looks at an object: answered as was recorded, or ended as not emulated.

What no recording tells is never guessed: `NotEmulated` ends the request, and the test with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import k8s_discovery
import k8s_schema
import kubernetes_validate

VERSIONS = {
    **{version: {*names.split()} for version, names in k8s_discovery.VERSIONS.items()},
    "kueue.x-k8s.io/v1beta1": {*k8s_discovery.VERSIONS["kueue.x-k8s.io/v1beta2"].split()},
}
VERSIONS["v1"] |= {"nodes", "resourcequotas"}
VERSIONS |= {
    "authentication.k8s.io/v1": {"selfsubjectreviews"}, "authorization.k8s.io/v1": {"selfsubjectrulesreviews"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions"}, "coordination.k8s.io/v1": {"leases"},
}  # fmt: skip
"""API version → its kinds."""
BODY_BYTES, CONFIG_MAP_BYTES = 3 << 20, 1 << 20
PATCHES = "application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"
"""What a custom resource takes."""
_TERM = re.compile(r"[\w./-]+=[\w.-]*")


class NotEmulated(Exception):
    """No recording tells how a server answers."""


class Refusal(NamedTuple):
    status: int
    reason: str
    message: str
    about: dict[str, Any] | None = None


def resource(plural: str, version: str) -> str:
    """As messages name it."""
    group, slash, _ = version.rpartition("/")
    return f"{plural}.{group}" if slash else plural


def forbidden(user: str, verb: str, match: re.Match[str]) -> str:
    plural, group, name, sub = match["plural"], match["group"].rpartition("/")[0], match["name"], match["sub"]
    about = f'{resource(plural, match["group"])} "{name}"' if name else resource(plural, match["group"])
    place = f'in the namespace "{match["namespace"]}"' if match["namespace"] else "at the cluster scope"
    what = f'{plural}/{sub}" in' if sub else f'{plural}" in'
    return f'{about} is forbidden: User "{user}" cannot {verb} resource "{what} API group "{group}" {place}'


def refused(
    command: str, match: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], data: bytes
) -> Refusal | None:
    """What is wrong with a request, whatever is there. Raises `NotEmulated`."""
    custom, accept = match["plural"] in k8s_schema.CUSTOM, headers.get("Accept", "*/*")
    if match["sub"] not in (None, "log") or (command == "PUT" and match["name"]):
        raise NotEmulated(f"{command} of {match['sub'] or 'an object'}")
    if "as=Table" in accept or "watch" in query:
        raise NotEmulated("a Table, or a watch")
    if "json" not in accept and "*/*" not in accept:
        if not custom:
            raise NotEmulated(f"Accept: {accept}")
        types = "application/json, application/yaml, application/vnd.kubernetes.protobuf"
        return Refusal(406, "NotAcceptable", f"only the following media types are accepted: {types}")
    if command == "PUT":
        return Refusal(400, "BadRequest", "name must be provided")
    if len(data) > BODY_BYTES:
        return Refusal(413, "RequestEntityTooLarge", f"Request entity too large: limit is {BODY_BYTES}")
    if command == "PATCH":
        return _patch(custom, headers.get("Content-Type", ""))
    if command == "DELETE" and "dryRun" in (json.loads(data) if data else query):
        raise NotEmulated("a deletion that is a dry run")
    if command == "POST":
        return _body(match, query, data)
    return _list(custom, query) if command == "GET" and not match["name"] else None


def _patch(custom: bool, kind: str) -> Refusal | None:
    if kind in ("application/merge-patch+json", "application/strategic-merge-patch+json") and not (
        custom and "strategic" in kind
    ):
        return None
    if kind in PATCHES.split(", ") or not custom:
        raise NotEmulated(f"a patch of the type {kind}")
    said = f"the body of the request was in an unknown format - accepted media types include: {PATCHES}"
    return Refusal(415, "UnsupportedMediaType", said)


def _body(match: re.Match[str], query: Mapping[str, str], data: bytes) -> Refusal | None:
    try:
        item = json.loads(data)
    except ValueError:
        kind = k8s_schema.crd("PyTorchJob")["kind"] if match["plural"] == "pytorchjobs" else None
        if data != b"{" or kind is None:
            raise NotEmulated("a body that is no JSON") from None
        said = f"the object provided is unrecognized (must be of type {kind}): couldn't get version/kind; json parse error: "
        return Refusal(400, "BadRequest", f"{said}unexpected end of JSON input ({{)")
    if (dry := query.get("dryRun", "All")) != "All":
        why = f'Unsupported value: ["{dry}"]: supported values: "All"'
        about = {"name": "", "group": "meta.k8s.io", "kind": "CreateOptions"}
        causes = [{"reason": "FieldValueNotSupported", "message": why, "field": "dryRun"}]
        said = f'CreateOptions.meta.k8s.io "" is invalid: dryRun: {why}'
        return Refusal(422, "Invalid", said, {**about, "causes": causes})
    if (version := item.get("apiVersion")) not in (None, match["group"]):
        said = f"the API version in the data ({version}) does not match the expected API version ({match['group']})"
        return Refusal(400, "BadRequest", said)
    if item.get("metadata", {}).get("namespace", match["namespace"]) != match["namespace"]:
        said = "the namespace of the provided object does not match the namespace sent on the request"
        return Refusal(400, "BadRequest", said)
    if match["plural"] in ("configmaps", "networkpolicies") and (error := _invalid(item)) is not None:
        unknown = re.search(r"'(\w+)' was unexpected", error.message)
        if error.path or unknown is None:
            raise NotEmulated(f"an invalid {item.get('kind')}: {error.message}")
        kind = item["kind"]
        said = (
            f'{kind} in version "v1" cannot be handled as a {kind}: strict decoding error: unknown field "{unknown[1]}"'
        )
        return Refusal(400, "BadRequest", said)
    texts, binaries = (list(item.get(key, {}).values()) for key in ("data", "binaryData"))
    size = sum(map(len, texts)) + sum(len(value) * 3 // 4 for value in binaries)
    if match["plural"] == "configmaps" and size > CONFIG_MAP_BYTES:
        why, name = f"Too long: may not be more than {CONFIG_MAP_BYTES} bytes", item["metadata"]["name"]
        causes = [{"reason": "FieldValueTooLong", "message": why, "field": "[]"}]
        about = {"name": name, "kind": "ConfigMap", "causes": causes}
        return Refusal(422, "Invalid", f'ConfigMap "{name}" is invalid: []: {why}', about)
    return None


def _invalid(item: Any) -> kubernetes_validate.ValidationError | None:
    try:
        kubernetes_validate.validate(item, "1.32", strict=True)
    except kubernetes_validate.ValidationError as error:
        return error
    return None


def _list(custom: bool, query: Mapping[str, str]) -> Refusal | None:
    if query.get("resourceVersion", "0") != "0" or "resourceVersionMatch" in query:
        raise NotEmulated("a list at a version")
    if not re.fullmatch(r"\d+:\d+", query.get("continue", "0:0")):
        why = "continue key is not valid: invalid character 'i' looking for beginning of value"
        return Refusal(400, "BadRequest", f"invalid continue token: {why}")
    labels, fields = (query.get(name, "") for name in ("labelSelector", "fieldSelector"))
    for term in filter(None, [*labels.split(","), *fields.split(",")]):
        if term == "a===b":
            return Refusal(400, "BadRequest", "unable to parse requirement: found '=', expected: identifier")
        if not _TERM.fullmatch(term):
            raise NotEmulated(f"the selector {term}")
    for name in (term.partition("=")[0] for term in filter(None, fields.split(","))):
        if custom and name not in ("metadata.name", "metadata.namespace"):
            return Refusal(400, "BadRequest", f"field label not supported: {name}")
    return None
