"""Admission: what a namespace lets in, with the words of Kubernetes 1.36's own plugins.

In their order: DefaultTolerationSeconds and LimitRanger fill in, then PodSecurity, LimitRanger and ResourceQuota refuse. A
refusal is a 403. Of a job's pods it reaches the operator alone: `k8s_operator.py` makes an event of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from k8s_security import violations
from kubernetes.utils.quantity import parse_quantity

Object = dict[str, Any]
GROUPS = {"pytorchjobs": "kubeflow.org", "trainjobs": "trainer.kubeflow.org", "jobs": "batch"}
UNREACHABLE, NOT_READY = "node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"
TOLERATION_SECONDS = 300


class Refused(Exception):
    """403: the message tells of what."""


def admitted(
    plural: str, item: Object, security: str, limits: list[Object], quotas: list[Object], others: list[Object]
) -> Object:
    """The object as it will be stored. Raises `Refused`.

    Args:
        security: PodSecurity's level, or "".
        limits, quotas: the namespace's LimitRanges and ResourceQuotas.
        others: what is there of the same kind.
    """
    item, refusal = copy.deepcopy(item), ""
    if plural == "pods":
        spec = item["spec"]
        for key in (NOT_READY, UNREACHABLE):
            if not any(tolerates(one, key) for one in spec.get("tolerations", [])):
                one = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATION_SECONDS}
                spec.setdefault("tolerations", []).append(one)
        for limit in limits:
            _fill_in(spec, limit)
        found = violations(spec, security) if security else []
        out = [text for limit in limits for text in _beyond(spec, limit)]
        if found:
            refusal = f'violates PodSecurity "{security}:latest": {", ".join(found)}'
        elif out:
            refusal = out[0] if len(out) == 1 else f"[{', '.join(out)}]"
    for quota in quotas:
        refusal = refusal or _exceeded(plural, item, quota, others)
    if refusal:
        kind = plural if plural not in GROUPS else f"{plural}.{GROUPS[plural]}"
        raise Refused(f'{kind} "{item["metadata"]["name"]}" is forbidden: {refusal}')
    return item


def tolerates(toleration: Object, key: str) -> bool:
    return toleration.get("key") in (None, "", key) and toleration.get("effect") in (None, "", "NoExecute")


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def _fill_in(spec: Object, limit: Object) -> None:
    """A LimitRange's defaults; a limit without a request is one."""
    for container in containers(spec):
        own = container.setdefault("resources", {})
        if "limits" in own:
            own["requests"] = {**own["limits"], **own.get("requests", {})}
        for row in limit["spec"]["limits"]:
            if row["type"] == "Container":
                asked = row.get("defaultRequest") or row.get("default") or row.get("min") or row.get("max") or {}
                for part, values in (("limits", row.get("default") or row.get("max") or {}), ("requests", asked)):
                    if values:
                        own[part] = {**values, **own.get(part, {})}


def _beyond(spec: Object, limit: Object) -> Iterator[str]:
    for row in limit["spec"]["limits"]:
        of = [container.get("resources", {}) for container in containers(spec)]
        if row["type"] == "Pod":
            of = [{part: _of_pod(spec, part) for part in ("requests", "limits")}]
        for own in of:
            for bound, part, sign in (("min", "requests", 1), ("max", "limits", -1)):
                for name, edge in row.get(bound, {}).items():
                    start, word = f"{bound}imum {name} usage per {row['type']} is {edge}", part[:-1]
                    have = own.get(part, {}).get(name)
                    if have is None:
                        yield f"{start}.  No {word} is specified"
                    elif sign * (parse_quantity(edge) - parse_quantity(have)) > 0:
                        yield f"{start}, but {word} is {have}"


def _of_pod(spec: Object, part: str) -> dict[str, str]:
    """What the containers of a pod take together; the init containers run before them, one by one."""
    sums: dict[str, Decimal] = {}
    for container in spec["containers"]:
        for name, value in container.get("resources", {}).get(part, {}).items():
            sums[name] = sums.get(name, Decimal(0)) + parse_quantity(value)
    for container in spec.get("initContainers", []):
        for name, value in container.get("resources", {}).get(part, {}).items():
            sums[name] = max(sums.get(name, Decimal(0)), parse_quantity(value))
    return {name: written(value) for name, value in sums.items()}


def written(value: Decimal) -> str:
    if value != int(value):
        return f"{int(value * 1000)}m"
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20)):
        if value >= size and value % size == 0:
            return f"{int(value) // size}{unit}"
    return str(int(value))


def _usage(plural: str, item: Object) -> dict[str, str]:
    """What one object counts for, under the names that a quota has for it."""
    if plural != "pods":
        return {f"count/{plural}.{GROUPS[plural]}" if plural in GROUPS else f"count/{plural}": "1", plural: "1"}
    asked, most = (_of_pod(item["spec"], part) for part in ("requests", "limits"))
    plain = {name: asked[name] for name in ("cpu", "memory") if name in asked}
    named = {f"requests.{name}": value for name, value in asked.items()}
    return {
        "pods": "1",
        "count/pods": "1",
        **plain,
        **named,
        **{f"limits.{name}": value for name, value in most.items()},
    }


def _exceeded(plural: str, item: Object, quota: Object, others: list[Object]) -> str:
    hard, name = quota["spec"]["hard"], quota["metadata"]["name"]
    if plural == "pods":
        missing = {}
        for key in sorted(hard):
            part, _, of = key.rpartition(".")
            if of in ("cpu", "memory"):
                part = part or "requests"
                lack = [
                    one["name"] for one in containers(item["spec"]) if of not in one.get("resources", {}).get(part, {})
                ]
                missing |= {key: lack} if lack else {}
        if missing:
            said = "; ".join(f"{key} for: {','.join(sorted(lack))}" for key, lack in missing.items())
            return f"failed quota: {name}: must specify {said}"
    mine = {key: value for key, value in _usage(plural, item).items() if key in hard}
    counting = [
        _usage(plural, other) for other in others if other.get("status", {}).get("phase") not in ("Succeeded", "Failed")
    ]
    used = {key: sum((parse_quantity(usage.get(key, "0")) for usage in counting), Decimal(0)) for key in mine}
    over = sorted(key for key in mine if used[key] + parse_quantity(mine[key]) > parse_quantity(hard[key]))
    if not over:
        return ""
    rows = (mine, {key: written(value) for key, value in used.items()}, hard)
    asked, had, most = (",".join(f"{key}={row[key]}" for key in over) for row in rows)
    return f"exceeded quota: {name}, requested: {asked}, used: {had}, limited: {most}"
