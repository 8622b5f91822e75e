"""Emulates the training-operator: its environment variables, its restart rule, its conditions and events.

It follows training-operator v1.9 with workers: the first worker that succeeds ends the job. Variables are appended after the
template's. With `restartPolicy: ExitCode` a pod that failed with 128 or more (or without a code) is deleted and created again,
uncounted. A lower code fails the job.
A pod that admission refuses becomes an event on the job and is tried again. The operator reports its actions in events, as recorded.
`k8s_kubelet.py` runs the pods.
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
from k8s_kubelet import Idle, Processes, running_status


def injected(job: dict[str, Any], master: str, port: int) -> dict[str, str]:
    """The variables that the operator appends to the container of a worker."""
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    return {
        "PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": spec["nprocPerNode"], "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{master}:{port}", "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
    }  # fmt: skip


class Operator:
    """Reconciles the PyTorchJobs of a `Cluster`, once at each call of `round`."""

    def __init__(self, cluster: Cluster, kubelet: Idle | None = None, namespace: str = "team") -> None:
        self.cluster, self.kubelet, self.namespace = cluster, kubelet or Idle(), namespace
        self.absent_pods: set[str] = set()
        """Names of pods that the operator does not create yet."""
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
        conditions = (job.get("status") or {}).get("conditions", [])
        finished = any(
            condition["type"] in ("Succeeded", "Failed") and condition["status"] == "True" for condition in conditions
        )
        phases, name = [], job["metadata"]["name"]
        self._condition(job, "Created", f"PyTorchJob {name} is created.")
        if job["spec"]["runPolicy"].get("suspend"):
            self._condition(job, "Suspended", f"PyTorchJob {name} is suspended.")
            self._record_event(job, "Normal", "PyTorchJobSuspended", f"PyTorchJob {name} is suspended.")
            return
        if any(condition["type"] == "Suspended" and condition["status"] == "True" for condition in conditions):
            self._condition(job, "Suspended", f"PyTorchJob {name} is resumed.", "False", "Resumed")
            self._record_event(job, "Normal", "PyTorchJobResumed", f"PyTorchJob {name} is resumed.")
        (item,) = job["spec"]["pytorchReplicaSpecs"].values()
        for index in range(item["replicas"]):
            pod = self.cluster.get("pods", host := f"{name}-worker-{index}", self.namespace)
            if pod is None:
                if not finished and host not in self.absent_pods:
                    self._create(job, index, host, item["template"])
                continue
            if finished:
                if pod["status"]["phase"] in ("Running", "Pending"):
                    self._delete(host)  # cleanPodPolicy: Running
                continue
            phases.append(self._observe(pod))
            if phases[-1] == "Failed":
                code = self._code(self.cluster.get("pods", host, self.namespace))
                if code is not None:
                    self._record_event(
                        job, "Normal", "ExitedWithCode", f"Pod: {self.namespace}.{host} exited with code {code}"
                    )
                if code is not None and code < 128:
                    self._condition(job, "Failed", f'job "{name}" is failing because "Worker" replica(s) failed.')
                    return
                self._delete(host)
                self._record_event(job, "Normal", "SuccessfulDeletePod", f"Deleted pod: {host}")
                why = f"job {name} is restarting because Worker replica(s) failed."
                for text in (why, f"PyTorchJob {name} is restarting because 1 Worker replica(s) failed."):
                    self._record_event(job, "Warning", "PyTorchJobRestarting", text)
                self._condition(job, "Restarting", why)
        if "Succeeded" in phases:  # the first worker that succeeds, as in any job without a Master
            self._condition(job, "Succeeded", f"PyTorchJob {self.namespace}/{name} successfully completed.")
        elif "Running" in phases:
            self._condition(job, "Running", f"PyTorchJob {self.namespace}/{name} is running.")

    @staticmethod
    def _code(pod: dict[str, Any]) -> int | None:
        """Returns the exit code of the pod's container; None if it ended without one."""
        states = [status["state"] for status in pod["status"].get("containerStatuses", [])]
        return next((state["terminated"]["exitCode"] for state in states if "terminated" in state), None)

    def _condition(self, job: dict[str, Any], kind: str, message: str, status: str = "True", reason: str = "") -> None:
        """Adds a condition. Running and Restarting replace each other; other conditions stay."""
        existing = (self.cluster.get("pytorchjobs", job["metadata"]["name"], self.namespace).get("status") or {}).get(
            "conditions", []
        )
        if any(one["type"] == kind and one["status"] == status for one in existing):
            return
        instead = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
        old = [one for one in existing if one["type"] not in (kind, instead)]
        for condition in old:
            if condition["type"] == "Running" and kind in ("Succeeded", "Failed"):
                condition["status"] = "False"
        times = dict.fromkeys(("lastTransitionTime", "lastUpdateTime"), self._stamp())
        one = {"type": kind, "status": status, "reason": f"PyTorchJob{reason or kind}", "message": message, **times}
        self.cluster.change("pytorchjobs", job["metadata"]["name"], self.namespace, status={"conditions": [*old, one]})

    def _create(self, job: dict[str, Any], index: int, name: str, template: dict[str, Any]) -> None:
        spec, meta = {**template["spec"], "nodeName": f"node-{index}"}, job["metadata"]
        mounted = self.kubelet.mounts(name, spec)
        if mounted is None:
            return  # the kubelet waits for its ConfigMaps
        labels = {
            **template["metadata"]["labels"], "training.kubeflow.org/job-name": meta["name"],
            "training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index),
        }  # fmt: skip
        owner = {
            "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"],
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip
        metadata = {"name": name, "labels": labels, "creationTimestamp": self._stamp(), "ownerReferences": [owner]}
        try:
            pod = self.cluster.create("pods", {"metadata": metadata, "spec": spec, "status": {}}, self.namespace)
        except Refused as refused:
            self._record_event(job, "Warning", "FailedCreatePod", f"Error creating: {refused}")
            return
        self._record_event(job, "Normal", "SuccessfulCreatePod", f"Created pod: {name}")
        if not self._recorded_event(
            job, service := f"Created service: {name}"
        ):  # the service stays when its pod is replaced
            self._record_event(job, "Normal", "SuccessfulCreateService", service)
        self.kubelet.start(pod, index, meta["uid"], mounted, partial(injected, job))
        status = running_status(spec["containers"][0]["name"], self._stamp())
        self.cluster.put("pods", {**pod, "status": status}, self.namespace)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self.now(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _record_event(self, job: dict[str, Any], kind: str, reason: str, message: str) -> None:
        """Puts an event, or counts a repeated one."""
        meta, now = job["metadata"], self._stamp()
        previous = self._recorded_event(job, message) or {"count": 0, "firstTimestamp": now}
        event = {
            "metadata": {"name": self._event(job, message)}, "type": kind, "reason": reason, "message": message, "lastTimestamp": now,
            "firstTimestamp": previous["firstTimestamp"], "count": previous["count"] + 1, "eventTime": None,
            "source": {"component": "pytorchjob-controller"}, "reportingComponent": "pytorchjob-controller",
            "involvedObject": {"kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]},
        }  # fmt: skip
        self.cluster.put("events", event, self.namespace)

    def _recorded_event(self, job: dict[str, Any], message: str) -> Any:
        return self.cluster.get("events", self._event(job, message), self.namespace)

    @staticmethod
    def _event(job: dict[str, Any], message: str) -> str:
        meta = job["metadata"]
        return f"{meta['name']}.{meta['uid'][:8]}{hash(message) & 0xFFFFFFFF:08x}"

    def _observe(self, pod: dict[str, Any]) -> str:
        """Returns the pod's phase, after its process may have ended."""
        code = self.kubelet.ended(pod) if pod["status"]["phase"] == "Running" else None
        if code is not None:
            pod = finish(self.cluster, pod, code, self.namespace)
        return str(pod["status"]["phase"])

    def _delete(self, name: str) -> None:
        """Removes the pod after its processes have ended."""
        self.kubelet.end(name)
        self.cluster.remove("pods", name, self.namespace)


class Running(Operator):
    """An operator with a thread that reconciles until `stop`. Its pods are real processes."""

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


def finish(cluster: Cluster, pod: dict[str, Any], code: int, namespace: str = "team") -> Any:
    """Ends the pod's container with that exit code."""
    termination = {"exitCode": code, "finishedAt": datetime.now(timezone.utc).isoformat()}
    state = {"name": pod["spec"]["containers"][0]["name"], "restartCount": 0, "state": {"terminated": termination}}
    status = {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [state]}
    return cluster.put("pods", {**pod, "status": status}, namespace)
