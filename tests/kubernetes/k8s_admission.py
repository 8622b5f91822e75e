"""What a server lets in, with the words of Kubernetes 1.36: decoding, validation, and admission by its own plugins.

A field that is unknown is a 400, an invalid one a 422. PodSecurity (`restricted`) and ResourceQuota (of objects) refuse with a
403; of a job's pods that reaches the operator alone: `k8s_operator.py` makes an event of it.
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
    """The server's answer, of which the message tells why."""

    def __init__(self, message: str, status: int = 403, reason: str = "Forbidden") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def check(plural: str, item: Object) -> None:
    """Strict decoding and validation. Raises `Refused`."""
    errors = [*k8s_schema.validator(item["kind"]).iter_errors(item)] if plural in k8s_schema.CUSTOM else []
    if unknown := k8s_schema.unknown_fields(errors):
        version, kind = item["apiVersion"].rpartition("/")[2], item["kind"]
        fields = ", ".join(f'unknown field "{name}"' for name in unknown)
        said = f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {fields}'
        raise Refused(said, 400, "BadRequest")
    if found := k8s_schema.causes(item, errors):
        raise Refused(f'{item["kind"]} "{item["metadata"]["name"]}" is invalid: {", ".join(found)}', 422, "Invalid")


def admitted(plural: str, item: Object, restricted: bool, quotas: list[Object], others: list[Object]) -> Object:
    """The object as it will be stored; `others`: what is there of the same kind. Raises `Refused`."""
    item, refusal = copy.deepcopy(item), ""
    if plural == "pods" and restricted and (found := violations(item["spec"])):
        refusal = f'violates PodSecurity "restricted:latest": {", ".join(found)}'
    kind = f"{plural}.{GROUPS[plural]}" if plural in GROUPS else plural
    used = len([one for one in others if one.get("status", {}).get("phase") not in ("Succeeded", "Failed")])
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
    """What `restricted` refuses: https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    found = [f"host namespaces ({name}=true)" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    kinds = {key for volume in pod.get("volumes", []) for key in volume if key != "name"}
    found += [f"restricted volume types ({kind})" for kind in sorted(kinds - VOLUMES)]
    whole = pod.get("securityContext") or {}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext") or {}
        added, dropped = (set((own.get("capabilities") or {}).get(key) or []) for key in ("add", "drop"))
        both = {**whole, **own}
        refused = {
            "privileged": own.get("privileged"),
            "allowPrivilegeEscalation != false": own.get("allowPrivilegeEscalation") is not False,
            "unrestricted capabilities": "ALL" not in dropped or added - {"NET_BIND_SERVICE"},
            "runAsNonRoot != true": both.get("runAsNonRoot") is not True,
            "runAsUser=0": both.get("runAsUser") == 0,
            "seccompProfile": (both.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"),
        }
        found += [f'{what} (container "{container["name"]}")' for what, is_so in refused.items() if is_so]
    return found
