"""Nodes that die: the node lifecycle controller and the taint manager, on a clock that the test advances.

Seen on Kubernetes 1.36: a node that has been silent for 40 s becomes `Unknown`. Its pods keep the phase Running and lose
`Ready`. After five minutes they are marked for deletion, and stay marked: no kubelet ends them.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from k8s_cluster import Cluster

EVICTED_AFTER = 300


class Clock:
    """Replaces `time` in a module of the product: `sleep` advances the clock and the nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self.now, self._nodes = 1_767_225_600.0, nodes  # the first second of 2026, as the objects' time stamps

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 5)
            self._nodes.tick()


class Nodes:
    """The nodes `names`, whose kubelets answer until they die."""

    def __init__(self, cluster: Cluster, *names: str) -> None:
        self.cluster, self.clock, self.grace = cluster, Clock(self), 40.0
        cluster.now = self.clock.time
        self._silent: dict[str, float] = {}
        """Dead node → the time of its death."""
        self._unknown: set[str] = set()
        for name in names:
            self._set_ready(name, "True")

    def die(self, name: str) -> None:
        self._silent.setdefault(name, self.clock.now)

    def tick(self) -> None:
        unknown = {name for name, since in self._silent.items() if self.clock.now - since >= self.grace}
        for name in unknown - self._unknown:
            self._set_ready(name, "Unknown")
        self._unknown = unknown
        for name in unknown:
            if self.clock.now - self._silent[name] >= self.grace + EVICTED_AFTER:
                for pod in self._pods(name):
                    self.evict(pod)

    def evict(self, pod: dict[str, Any]) -> None:
        """Marks a pod for deletion after its grace."""
        if "deletionTimestamp" not in pod["metadata"]:
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30)
            until = datetime.fromtimestamp(self.clock.now + grace, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            marks = {"deletionTimestamp": until, "deletionGracePeriodSeconds": grace}
            self.cluster.change("pods", pod["metadata"]["name"], metadata=marks)

    def _set_ready(self, name: str, status: str) -> None:
        node = self.cluster.get("nodes", name, "") or {"metadata": {"name": name}, "status": {}}
        ready = {"type": "Ready", "status": status}
        self.cluster.put("nodes", {**node, "status": {**node["status"], "conditions": [ready]}}, "")
        of_pods = ready if status == "True" else {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
        for pod in self._pods(name):
            by_type = {condition["type"]: condition for condition in pod["status"].get("conditions", [])}
            if "Ready" in by_type:
                conditions = [*({**by_type, "Ready": of_pods}.values())]
                self.cluster.change("pods", pod["metadata"]["name"], status={"conditions": conditions})

    def _pods(self, node: str) -> list[dict[str, Any]]:
        return [pod for pod in self.cluster.all("pods") if pod["spec"].get("nodeName") == node]
