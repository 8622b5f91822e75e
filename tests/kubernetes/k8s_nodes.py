"""Nodes that die: their leases, the node lifecycle controller and the taint manager, on a clock that the test turns.

Seen on Kubernetes 1.36: a node whose lease ends becomes `Unknown` after 40 s. Its pods keep the phase Running and lose
`Ready`; when their toleration is over they are marked for deletion, and stay so for ever: nobody is there to end them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from k8s_admission import UNREACHABLE, tolerates
from k8s_cluster import Cluster

LEASES = "kube-node-lease"
Object = dict[str, Any]


class Clock:
    """Stands where a module of the product has `time`: its sleeping turns the clock, and what runs by it goes on."""

    def __init__(self, nodes: Nodes) -> None:
        self.now, self._nodes = 1_767_225_600.0, nodes  # the first second of 2026, as the objects' time stamps

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 5)
            self._nodes.tick(self.now)


class Nodes:
    """The nodes `names`, whose kubelets renew their leases until they die."""

    def __init__(self, cluster: Cluster, *names: str, namespace: str = "team") -> None:
        self.cluster, self.namespace, self.dead = cluster, namespace, set[str]()
        self.clock, self.grace = Clock(self), 40.0
        self.reason = "NodeNotReady"
        """With it pods of a dead node lose `Ready`; some versions give none."""
        self._taints: dict[str, dict[str, float]] = {name: {} for name in names}
        """Key → since when, of each node."""
        for name in names:
            self._say(name, "True", "KubeletReady")
        self.tick(self.clock.now)

    def die(self, name: str) -> None:
        self.dead.add(name)

    def come_back(self, name: str) -> None:
        self.dead.discard(name)

    def drain(self, name: str) -> None:
        """Somebody wants the node empty. Its kubelet lives, and gives its pods their grace."""
        self._taints[name]["maintenance"] = self.clock.now
        self.tick(self.clock.now)

    def tick(self, now: float) -> None:
        for name, taints in self._taints.items():
            if name not in self.dead:
                spec = {"holderIdentity": name, "renewTime": now}
                self.cluster.put("leases", {"metadata": {"name": name}, "spec": spec}, LEASES)
            lease = self.cluster.get("leases", name, LEASES)
            silent = lease is not None and now - lease["spec"]["renewTime"] >= self.grace
            if silent and UNREACHABLE not in taints:
                taints[UNREACHABLE] = now
                self._say(name, "Unknown", "NodeStatusUnknown")
            elif not silent and taints.pop(UNREACHABLE, None) is not None:
                self._say(name, "True", "KubeletReady")
            for key, since in taints.items():
                self._evict(name, key, now - since)

    def _say(self, name: str, status: str, reason: str) -> None:
        spec = {"taints": [{"key": key, "effect": "NoExecute"} for key in self._taints[name]]}
        node = self.cluster.get("nodes", name, "") or {"metadata": {"name": name}, "status": {}}
        conditions = [_ready(status, reason)]
        self.cluster.put("nodes", {**node, "spec": spec, "status": {**node["status"], "conditions": conditions}}, "")
        for pod in self._pods(name):
            had = {one["type"]: one for one in pod["status"].get("conditions", [])}
            if "Ready" in had:
                ready = _ready("True", "") if status == "True" else _ready("False", self.reason)
                self._put(pod, [*({**had, "Ready": ready}.values())])

    def _evict(self, node: str, key: str, tainted: float) -> None:
        """The taint manager: after the shortest toleration of those that fit; without one at once, without an end never."""
        for pod in self._pods(node):
            fitting = [one for one in pod["spec"].get("tolerations", []) if tolerates(one, key)]
            given = [one["tolerationSeconds"] for one in fitting if "tolerationSeconds" in one]
            stays = bool(fitting) and not given
            if stays or "deletionTimestamp" in pod["metadata"] or tainted < min(given, default=0):
                continue
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
            until = datetime.fromtimestamp(self.clock.now + grace, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            meta = {**pod["metadata"], "deletionTimestamp": until, "deletionGracePeriodSeconds": grace}
            why = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            self._put({**pod, "metadata": meta}, [*pod["status"].get("conditions", []), why])

    def _pods(self, node: str) -> Iterator[Object]:
        return (pod for pod in self.cluster.all("pods", self.namespace) if pod["spec"].get("nodeName") == node)

    def _put(self, pod: Object, conditions: list[Object]) -> None:
        self.cluster.put("pods", {**pod, "status": {**pod["status"], "conditions": conditions}}, self.namespace)


def _ready(status: str, reason: str) -> Object:
    return {"type": "Ready", "status": status, **({"reason": reason} if reason else {})}
