"""Decoding, validation and built-in admission plugins of a server, with the messages of Kubernetes 1.36.

An unknown field is a 400, an invalid field a 422. PodSecurity (`restricted`) and ResourceQuota (of objects) refuse with a 403.
For a job's pods only the operator sees the 403: `k8s_operator.py` makes an event of it.
"""

from __future__ import annotations

import copy
from typing import Any

import k8s_schema

Object = dict[str, Any]
GROUPS = {
    "pytorchjobs": "kubeflow.org",
    "trainjobs": "trainer.kubeflow.org",
    "jobs": "batch",
    "networkpolicies": "networking.k8s.io",
}
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


class Refused(Exception):
    """The server's refusal. The message has the reason."""

    def __init__(self, message: str, status: int = 403, reason: str = "Forbidden") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def check(plural: str, item: Object) -> None:
    """Decodes and validates an object strictly. Raises `Refused`."""
    errors = [*k8s_schema.validator(item["kind"]).iter_errors(item)] if plural in k8s_schema.CUSTOM else []
    if unknown := k8s_schema.unknown_fields(errors):
        version, kind = item["apiVersion"].rpartition("/")[2], item["kind"]
        fields = ", ".join(f'unknown field "{name}"' for name in unknown)
        message = f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {fields}'
        raise Refused(message, 400, "BadRequest")
    if causes := k8s_schema.causes(item, errors):
        raise Refused(f'{item["kind"]} "{item["metadata"]["name"]}" is invalid: {", ".join(causes)}', 422, "Invalid")


def admitted(plural: str, item: Object, restricted: bool, quotas: list[Object], existing: list[Object]) -> Object:
    """Returns the object to store; `existing`: the objects of the same kind. Raises `Refused`."""
    item, refusal = copy.deepcopy(item), ""
    if plural == "pods" and restricted and (breaches := violations(item["spec"])):
        refusal = f'violates PodSecurity "restricted:latest": {", ".join(breaches)}'
    kind = f"{plural}.{GROUPS[plural]}" if plural in GROUPS else plural
    used = len([each for each in existing if each.get("status", {}).get("phase") not in ("Succeeded", "Failed")])
    for quota in quotas:
        hard, name = quota["spec"]["hard"], quota["metadata"]["name"]
        for key in (plural, f"count/{kind}"):
            if key in hard and used >= int(hard[key]) and not refusal:
                numbers = f"requested: {key}=1, used: {key}={used}, limited: {key}={hard[key]}"
                refusal = f"exceeded quota: {name}, {numbers}"
    if refusal:
        raise Refused(f'{kind} "{item["metadata"]["name"]}" is forbidden: {refusal}')
    return item


def violations(pod: Object) -> list[str]:
    """Returns the reasons why `restricted` refuses a pod: https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    breaches = [f"host namespaces ({name}=true)" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    kinds = {key for volume in pod.get("volumes", []) for key in volume if key != "name"}
    breaches += [f"restricted volume types ({kind})" for kind in sorted(kinds - VOLUMES)]
    pod_context = pod.get("securityContext") or {}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        container_context = container.get("securityContext") or {}
        added, dropped = (set((container_context.get("capabilities") or {}).get(key) or []) for key in ("add", "drop"))
        context = {**pod_context, **container_context}
        refused = {
            "privileged": container_context.get("privileged"),
            "allowPrivilegeEscalation != false": container_context.get("allowPrivilegeEscalation") is not False,
            "unrestricted capabilities": "ALL" not in dropped or added - {"NET_BIND_SERVICE"},
            "runAsNonRoot != true": context.get("runAsNonRoot") is not True,
            "runAsUser=0": context.get("runAsUser") == 0,
            "seccompProfile": (context.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"),
        }
        breaches += [f'{breach} (container "{container["name"]}")' for breach, is_so in refused.items() if is_so]
    return breaches
