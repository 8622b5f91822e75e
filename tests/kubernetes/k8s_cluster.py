"""The state of an emulated Kubernetes cluster: objects with uids and versions, and faults on demand.

It emulates admission (`k8s_admission.py`), finalizers, the decisions of a Role, and garbage collection. A real collector acts
0.5 to 0.6 s after the owner's deletion, in the foreground, too.
`k8s_server.py` is its API server, `k8s_operator.py` the training-operator, `k8s_nodes.py` the nodes.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import k8s_admission
import k8s_kubectl

KINDS = {
    kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s"): kind
    for kind in [
        "Pod", "Event", "NetworkPolicy", "PyTorchJob", "Job", "TrainJob", "Workload", "Node", "PersistentVolumeClaim",
        "LocalQueue", "Secret", "SelfSubjectRulesReview", "SelfSubjectReview", "ConfigMap", "ResourceQuota",
    ]
}  # fmt: skip
FOREGROUND = "foregroundDeletion"
"""The finalizer of an object that is removed after its dependants."""


@dataclass
class Fault:
    """A fault of the next `times` requests that match."""

    method: str
    path: str
    status: int = 0
    message: str = "emulated fault"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    drop: bool = False
    drop_answer: bool = False  # the request is carried out, its answer never arrives
    drop_after_lines: int | None = None
    times: int = 1
    hits: int = 0


class Cluster:
    """The state behind the server. All methods may be called from tests while clients talk to it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.version = 100
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.tokens: set[str] = {"good"}
        self.logs: dict[str, list[str]] = {}
        self.unknown: set[str] = {"trainjobs"}
        """Kinds, or versions of groups, that are not served. By default only the training-operator is installed."""
        self.denied: set[str] = set()
        self.not_emulated: list[str] = []
        """Requests without a recorded answer, with the reason. A test that sends one fails."""
        self.incomplete = False
        """Whether an authorizer does not list its grants."""
        self.kubectl = k8s_kubectl.Kubectl()
        self.stopping = False
        self.role: set[tuple[str, str]] | None = None
        """(verb, resource) pairs that are allowed in the namespace `home`; None: everything, everywhere."""
        self.home = "team"
        self.namespaces = {"team", "lockstep"}
        self.restricted = False
        """Whether the namespaces enforce PodSecurity's level `restricted`."""
        self.lag = 0.5
        self.now = time.time
        """The server's clock, also in the answers' Date header."""
        self.graceful = False
        """Whether deleted pods are only marked. The operator ends and removes them."""
        self.busy = 0
        """Number of requests that are in progress."""
        self.arrived: Callable[[str, str], bool] | None = None
        """Gets each request (method, path) before the server handles it, and returns whether the request is lost."""
        self.spoil: Callable[[str, Any], bytes | None] | None = None
        """Gets each good answer to a GET (path, value; None for a stream), and may return a replacement."""

    def allow(self, *roles: dict[str, Any], namespace: str = "team") -> None:
        """Allows only the requests that these Roles of the namespace grant."""
        self.home = namespace
        rules = [rule for role in roles for rule in role["rules"]]
        self.role = {(verb, name) for rule in rules for name in rule["resources"] for verb in rule["verbs"]}

    def create(self, plural: str, item: Any, namespace: str = "team", dry_run: bool = False) -> Any:
        """Creates an object after admission. Raises `k8s_admission.Refused`, and `KeyError` if the object exists."""
        with self.changed:
            quotas, existing = (self.all(kind, namespace) for kind in ("resourcequotas", plural))
            item = k8s_admission.admitted(plural, item, self.restricted, quotas, existing)
            if (plural, namespace, item["metadata"]["name"]) in self.objects:
                raise KeyError(item["metadata"]["name"])
            if dry_run:  # the uid is not used again
                item["metadata"] |= {
                    "namespace": namespace,
                    "uid": str(uuid.uuid4()),
                    "creationTimestamp": self.stamp(),
                }
                return item
            uids = {each["metadata"]["uid"] for each in self.objects.values()}
            for owner in item["metadata"].get("ownerReferences") or []:
                if owner["uid"] not in uids:  # the owner does not exist
                    self._later(self.collect, owner["uid"])
            return self.put(plural, item, namespace)

    def pod(self, job: str, name: str, status: Any, plural: str = "pytorchjobs", **parts: Any) -> Any:
        """Puts a pod as the job's operator makes it."""
        owner = self.get(plural, job)
        kind = (
            {"kind": "PyTorchJob", "name": job} if plural == "pytorchjobs" else {"kind": "Job", "name": f"{job}-node-0"}
        )
        meta = parts.pop("metadata", {})
        labels = {"lockstep/job": job, **meta.pop("labels", {})}
        references = [{**kind, "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}]
        metadata = {"name": name, "labels": labels, "ownerReferences": references, **meta}
        return self.put("pods", {"metadata": metadata, "spec": {}, "status": status, **parts})

    def put(self, plural: str, item: Any, namespace: str = "team") -> Any:
        """Creates or replaces an object without admission."""
        with self.changed:
            key = (plural, namespace, item["metadata"]["name"])
            previous = self.objects.get(key)
            self.version += 1
            meta = item["metadata"]
            meta.setdefault("uid", previous["metadata"]["uid"] if previous else str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            meta["namespace"], meta["resourceVersion"] = namespace, str(self.version)
            item.setdefault("kind", KINDS[plural])
            self.objects[key] = item
            self.changed.notify_all()
        return item

    def change(self, plural: str, name: str, namespace: str = "team", **parts: dict[str, Any]) -> Any:
        """Replaces fields of an object's parts (`metadata={"finalizers": []}`)."""
        with self.changed:
            item = self.objects[plural, namespace, name]
            return self.put(
                plural, {**item, **{key: {**item.get(key, {}), **part} for key, part in parts.items()}}, namespace
            )

    def set_conditions(self, name: str, *conditions: dict[str, str], plural: str = "pytorchjobs") -> None:
        """Replaces the conditions of the job."""
        self.change(plural, name, status={"conditions": [{"status": "True", **one} for one in conditions]})

    def remove(self, plural: str, name: str, namespace: str = "team") -> None:
        with self.changed:
            item = self.objects.pop((plural, namespace, name), None)
            if item is not None:
                self.version += 1
                self.changed.notify_all()
                self._later(self.collect, item["metadata"]["uid"])

    def delete(self, plural: str, name: str, namespace: str = "team", foreground: bool = False) -> Any:
        """Deletes an object. An object with finalizers is marked, stays, and is returned. In the foreground it has a
        finalizer until its dependants are removed."""
        with self.changed:
            item = self.objects.get((plural, namespace, name))
            if item is None:
                return None
            meta, finalizers = item["metadata"], list(item["metadata"].get("finalizers") or [])
            if foreground and FOREGROUND not in finalizers and "deletionTimestamp" not in meta:
                finalizers.append(FOREGROUND)
            if not finalizers:
                self.remove(plural, name, namespace)
                return None
            if "deletionTimestamp" not in meta:
                marks = {"deletionTimestamp": self.stamp(), "deletionGracePeriodSeconds": 0, "finalizers": finalizers}
                item = self.change(plural, name, namespace, metadata=marks)
                if FOREGROUND in finalizers:
                    self._later(self._go_last, plural, namespace, name, meta["uid"])
            return item

    def collect(self, uid: str) -> None:
        """Deletes the objects whose owner has this uid. A new object with the owner's name does not save them."""
        with self.changed:
            for plural, namespace, name in self._owned(uid):
                item = self.objects[plural, namespace, name]
                if plural != "pods" or not self.graceful:
                    self.delete(plural, name, namespace)
                elif "deletionTimestamp" not in item["metadata"]:
                    until = self.stamp(item["spec"].get("terminationGracePeriodSeconds", 30))
                    self.change(plural, name, namespace, metadata={"deletionTimestamp": until})

    def _owned(self, uid: str, **fields: Any) -> list[tuple[str, str, str]]:
        """Returns the keys of objects with an owner reference that has this uid and these fields."""
        reference = {"uid": uid, **fields}.items()
        references = [(key, item["metadata"].get("ownerReferences") or []) for key, item in self.objects.items()]
        return [key for key, owners in references if any(reference <= owner.items() for owner in owners)]

    def _go_last(self, plural: str, namespace: str, name: str, uid: str) -> None:
        """Removes the finalizer after the dependants that block the owner's deletion."""
        with self.changed:
            self.collect(uid)
            while not self.stopping and self._owned(uid, blockOwnerDeletion=True):
                self.changed.wait(0.1)
            item = self.objects.get((plural, namespace, name))
            if item is None or item["metadata"]["uid"] != uid:
                return
            remaining = [finalizer for finalizer in item["metadata"]["finalizers"] if finalizer != FOREGROUND]
            if remaining:
                self.change(plural, name, namespace, metadata={"finalizers": remaining})
            else:
                self.remove(plural, name, namespace)

    def _later(self, work: Callable[..., None], *arguments: str) -> None:
        """Schedules work of the garbage collector after its lag."""
        collector = threading.Timer(self.lag, work, arguments)
        collector.daemon = True
        collector.start()

    def get(self, plural: str, name: str, namespace: str = "team") -> Any:
        with self.changed:
            return self.objects.get((plural, namespace, name))

    def all(self, plural: str, namespace: str = "team") -> list[dict[str, Any]]:
        """Returns the objects of a namespace; of all namespaces if it is empty."""
        with self.changed:
            return [
                item for (kind, place, _), item in self.objects.items() if kind == plural and namespace in ("", place)
            ]

    def stamp(self, later: float = 0) -> str:
        return datetime.fromtimestamp(self.now() + later, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.changed:
            for fault in self.faults:
                if fault.times > 0 and fault.method in (method, "*") and re.search(fault.path, path):
                    fault.times -= 1
                    fault.hits += 1
                    return fault
        return None


def matches(item: dict[str, Any], query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    wanted = [tuple(term.split("=")) for term in query.get("labelSelector", "").split(",") if term]
    if any(labels.get(name) != value for name, value in wanted):
        return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        current: Any = item
        for part in name.split("."):
            current = current.get(part, {}) if isinstance(current, dict) else {}
        if current != value:
            return False
    return True
