"""The training-operator's part: its environment variables, its restart rule, its conditions and events.

Written from what training-operator v1.9 does: variables are appended after the template's; with `restartPolicy: ExitCode`
a pod that failed with 128 or more (or without a code) is deleted and created again, uncounted; a lower code fails the job.
A pod that admission refuses becomes an event on the job and is tried again. `k8s_kubelet.py` runs the pods.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from k8s_admission import Refused
from k8s_cluster import Cluster
from k8s_kubelet import Idle, Processes, started

# What training-operator 1.9 puts before a worker that has a Master beside it: no securityContext.
INIT_CONTAINER = {
    "name": "init-pytorch",
    "image": "alpine:3.10",
    "command": ["sh", "-c", "until nslookup master; do sleep 2; done"],
    "resources": {"requests": {"cpu": "50m", "memory": "10Mi"}, "limits": {"cpu": "100m", "memory": "20Mi"}},
}


def injected(job: dict[str, Any], replica: str, index: int, master: str, port: int) -> dict[str, str]:
    """The variables that the operator appends to a pod's container."""
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    pods = sum(item["replicas"] for item in replicas.values())
    env = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": spec["nprocPerNode"], "PET_NNODES": str(pods)}
    if "Master" in replicas:
        rank = index if replica == "Master" else index + 1
        env |= {
            "MASTER_ADDR": master, "MASTER_PORT": str(port), "PET_MASTER_ADDR": master, "PET_MASTER_PORT": str(port),
            "WORLD_SIZE": str(pods * int(spec["nprocPerNode"])), "RANK": str(rank), "PET_NODE_RANK": str(rank),
        }  # fmt: skip
    policy = spec.get("elasticPolicy")
    if policy is not None:
        env |= {
            "PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ENDPOINT": f"{master}:{port}",
            "PET_RDZV_ID": policy["rdzvId"], "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        }  # fmt: skip
    return env


class Operator:
    """Reconciles the PyTorchJobs of a `Cluster`, once at each call of `round`."""

    def __init__(self, cluster: Cluster, kubelet: Idle | None = None, namespace: str = "team") -> None:
        self.cluster, self.kubelet, self.namespace = cluster, kubelet or Idle(), namespace
        self.held: set[str] = set()
        """Pods that are not there yet."""
        self.now = time.time

    def round(self) -> None:
        jobs, pods = self.cluster.all("pytorchjobs", self.namespace), self.cluster.all("pods", self.namespace)
        names = {job["metadata"]["name"] for job in jobs}
        for pod in pods:
            marked = self.cluster.graceful and "deletionTimestamp" in pod["metadata"]
            if marked or pod["metadata"]["labels"]["training.kubeflow.org/job-name"] not in names:
                self._delete(pod["metadata"]["name"])
        for job in jobs:
            if "deletionTimestamp" not in job["metadata"]:
                self._reconcile(job)

    def _reconcile(self, job: dict[str, Any]) -> None:
        status = job.get("status") or {}
        finished = any(
            c["type"] in ("Succeeded", "Failed") and c["status"] == "True" for c in status.get("conditions", [])
        )
        phases: dict[str, str] = {}
        for replica, item in job["spec"]["pytorchReplicaSpecs"].items():
            for index in range(item["replicas"]):
                name = f"{job['metadata']['name']}-{replica.lower()}-{index}"
                pod = self.cluster.get("pods", name, self.namespace)
                if finished:
                    if pod is not None and pod["status"]["phase"] in ("Running", "Pending"):
                        self._delete(name)  # cleanPodPolicy: Running
                    continue
                if pod is None and name in self.held:
                    continue
                if pod is None:
                    self._create(job, replica, index, name, item["template"])
                    continue
                self._observe(pod)
                phases[name] = pod["status"]["phase"]
                if pod["status"]["phase"] == "Failed":
                    code = pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
                    if item["restartPolicy"] == "ExitCode" and code < 128:
                        message = f'job "{job["metadata"]["name"]}" is failing because "{replica}" replica(s) failed.'
                        self._condition(job, "Failed", message)
                        return
                    self._delete(name)
                    message = f"job {job['metadata']['name']} is restarting because {replica} replica(s) failed."
                    self._condition(job, "Restarting", message)
        if finished or not phases:
            return
        # The Master decides; without one all workers, and in an elastic job the first that has succeeded.
        deciding = [phase for name, phase in phases.items() if "-master-" in name] or list(phases.values())
        succeeded = [phase == "Succeeded" for phase in deciding]
        if any(succeeded) if job["spec"].get("elasticPolicy") else all(succeeded):
            self._condition(job, "Succeeded", f"PyTorchJob {job['metadata']['name']} is successfully completed.")
        elif "Running" in deciding:
            self._condition(job, "Running", f"PyTorchJob {job['metadata']['name']} is running.")

    def _condition(self, job: dict[str, Any], kind: str, message: str) -> None:
        old = [c for c in (job.get("status") or {}).get("conditions", []) if c["type"] != kind]
        if any(c["type"] == kind and c["status"] == "True" for c in (job.get("status") or {}).get("conditions", [])):
            return
        for condition in old:
            if condition["type"] in ("Running", "Restarting"):
                condition["status"] = "False"  # conditions linger
        conditions = [*old, {"type": kind, "status": "True", "reason": kind, "message": message}]
        self.cluster.put("pytorchjobs", {**job, "status": {"conditions": conditions}}, self.namespace)

    def _create(self, job: dict[str, Any], replica: str, index: int, name: str, template: dict[str, Any]) -> None:
        job_name, beside_master = job["metadata"]["name"], "Master" in job["spec"]["pytorchReplicaSpecs"]
        node = index + (1 if replica == "Worker" and beside_master else 0)
        spec = {**template["spec"], "nodeName": f"node-{node}"}
        if replica == "Worker" and beside_master:
            spec["initContainers"] = [INIT_CONTAINER]
        mounted = self.kubelet.mounts(name, spec)
        if mounted is None:
            return  # as the kubelet, which waits for what is to be mounted
        labels = {
            **template["metadata"]["labels"], "training.kubeflow.org/job-name": job_name,
            "training.kubeflow.org/replica-type": replica.lower(), "training.kubeflow.org/replica-index": str(index),
        }  # fmt: skip
        owner = {
            "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": job_name, "uid": job["metadata"]["uid"],
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        meta = {"name": name, "labels": labels, "creationTimestamp": self._stamp(), "ownerReferences": [owner]}
        try:
            pod = self.cluster.create("pods", {"metadata": meta, "spec": spec, "status": {}}, self.namespace)
        except Refused as refused:
            self._tell(job, f"Error creating: {refused}")
            return
        self.kubelet.start(pod, node, job["metadata"]["uid"], mounted, partial(injected, job, replica, index))
        self.cluster.put("pods", {**pod, "status": started(spec["containers"][0]["name"])}, self.namespace)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self.now(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _tell(self, job: dict[str, Any], message: str) -> None:
        """An event; the same again counts."""
        meta = job["metadata"]
        event = {
            "metadata": {"name": f"{meta['name']}.{meta['uid'][:8]}{hash(message) & 0xFFFFFFFF:08x}"}, "type": "Warning",
            "reason": "FailedCreatePod", "message": message, "lastTimestamp": self._stamp(),
            "involvedObject": {"kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]},
        }  # fmt: skip
        self.cluster.put("events", event, self.namespace)

    def _observe(self, pod: dict[str, Any]) -> None:
        code = self.kubelet.ended(pod) if pod["status"]["phase"] == "Running" else None
        if code is not None:
            finish(self.cluster, pod, code, self.namespace)

    def _delete(self, name: str) -> None:
        """The object goes when what runs in it has gone."""
        self.kubelet.end(name)
        self.cluster.remove("pods", name, self.namespace)


class Running(Operator):
    """An operator that goes on by itself until `stop`, with real processes for pods."""

    kubelet: Processes

    def __init__(self, cluster: Cluster, folder: Path, namespace: str = "team") -> None:
        super().__init__(cluster, Processes(cluster, folder, namespace), namespace)
        cluster.graceful = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stopping.wait(0.05):
            self.round()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(90)
        self.kubelet.stop()


def finish(cluster: Cluster, pod: dict[str, Any], code: int, namespace: str = "team", **more: Any) -> None:
    """The pod's container has ended with that code; `more` goes into how (`reason`)."""
    ended = {"exitCode": code, "finishedAt": datetime.now(timezone.utc).isoformat(), **more}
    name = pod["spec"]["containers"][0]["name"]
    status = {
        "phase": "Succeeded" if code == 0 else "Failed",
        "containerStatuses": [{"name": name, "restartCount": 0, "state": {"terminated": ended}}],
    }
    cluster.put("pods", {**pod, "status": status}, namespace)


def until(condition: Any, seconds: float, what: str) -> None:
    """Polls with a bound."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
