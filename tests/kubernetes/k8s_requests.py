"""Which requests are emulated.

No answer is guessed: a request without a recording raises `NotEmulated`, and its test fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import k8s_schema
import kubernetes_validate

VERSIONS = {
    "v1": {"persistentvolumeclaims", "configmaps", "secrets", "pods", "events", "nodes", "resourcequotas"},
    "batch/v1": {"jobs"}, "networking.k8s.io/v1": {"networkpolicies"},
    "kubeflow.org/v1": {"pytorchjobs"}, "trainer.kubeflow.org/v1alpha1": {"trainjobs"},
    "kueue.x-k8s.io/v1beta1": {"localqueues", "workloads"}, "kueue.x-k8s.io/v1beta2": {"localqueues", "workloads"},
    "authentication.k8s.io/v1": {"selfsubjectreviews"}, "authorization.k8s.io/v1": {"selfsubjectrulesreviews"},
}  # fmt: skip
"""API version → its kinds."""
CONFIG_MAP_BYTES = 1 << 20
_TERM = re.compile(r"[\w./-]+=[\w.-]*")


class NotEmulated(Exception):
    """No recording has the server's answer."""


def check(
    command: str, match: re.Match[str], query: Mapping[str, str], headers: Mapping[str, str], data: bytes
) -> None:
    """Raises `NotEmulated` for a request that Lockstep has no reason to send."""
    custom, accept = match["plural"] in k8s_schema.CUSTOM, headers.get("Accept", "*/*")
    if match["sub"] not in (None, "log"):
        raise NotEmulated(f"{command} of {match['sub'] or 'an object'}")
    if "as=" in accept or "watch" in query or not ("json" in accept or "*/*" in accept):
        raise NotEmulated(f"a watch, or Accept: {accept}")
    kind = headers.get("Content-Type", "")
    if command == "PATCH" and kind != "application/merge-patch+json":
        raise NotEmulated(f"a patch of the type {kind}")
    if command == "DELETE" and "dryRun" in (json.loads(data) if data else query):
        raise NotEmulated("a deletion that is a dry run")
    if command == "POST":
        _check_body(match, query, data)
    if command == "GET" and not match["name"]:
        _check_list(custom, query)


def _check_body(match: re.Match[str], query: Mapping[str, str], data: bytes) -> None:
    item = json.loads(data)
    if query.get("dryRun", "All") != "All" or item.get("apiVersion") not in (None, match["group"]):
        raise NotEmulated("an object of another API version, or another dry run")
    if item.get("metadata", {}).get("namespace", match["namespace"]) != match["namespace"]:
        raise NotEmulated("an object of another namespace")
    if match["plural"] in ("configmaps", "networkpolicies"):
        try:
            kubernetes_validate.validate(item, "1.32", strict=True)
        except kubernetes_validate.ValidationError as error:
            raise NotEmulated(f"an invalid {item.get('kind')}: {error.message}") from None
    if match["plural"] == "configmaps" and len(data) > 4 * CONFIG_MAP_BYTES // 3:
        raise NotEmulated("a ConfigMap that is too large")


def _check_list(custom: bool, query: Mapping[str, str]) -> None:
    if query.get("resourceVersion", "0") != "0" or "resourceVersionMatch" in query:
        raise NotEmulated("a list at a version")
    labels, fields = (list(filter(None, query.get(name, "").split(","))) for name in ("labelSelector", "fieldSelector"))
    for term in [*labels, *fields]:
        if not _TERM.fullmatch(term):
            raise NotEmulated(f"the selector {term}")
    if custom and not {term.partition("=")[0] for term in fields} <= {"metadata.name", "metadata.namespace"}:
        raise NotEmulated(f"the fields {fields}")
