"""The training-operator's part, with real processes for pods: its environment variables, its restart rule, its conditions.

Written from what training-operator v1.9 does: variables are appended after the template's; with `restartPolicy: ExitCode`
a pod that failed with 128 or more (or without a code) is deleted and created again, uncounted; a lower code fails the job.
One machine stands for all nodes, so each launcher gets a loopback address of its own and the rendezvous a free port.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from k8s_admission import INIT_CONTAINER, violations
from k8s_exec import Container
from k8s_server import Cluster

from tests.processes import free_port

REPOSITORY = Path(__file__).parents[2]


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


@dataclass
class _Pod:
    process: subprocess.Popen[bytes]
    reader: threading.Thread


class Operator:
    """Reconciles PyTorchJobs of a `Cluster` until `stop()`. Nothing it started survives it."""

    def __init__(self, cluster: Cluster, folder: Path, namespace: str = "team") -> None:
        self.cluster, self.folder, self.namespace = cluster, folder, namespace
        self.pods: dict[str, _Pod] = {}
        self.starts: dict[str, int] = {}
        self.security = ""
        """PodSecurity's level in the namespace."""
        self.held: set[str] = set()
        """Pods that are not there yet."""
        self._ports: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stopping.wait(0.05):
            with self.cluster.changed:
                jobs = [item for (plural, _, _), item in self.cluster.objects.items() if plural == "pytorchjobs"]
                owned = [item for (plural, _, _), item in self.cluster.objects.items() if plural == "pods"]
            names = {job["metadata"]["name"] for job in jobs}
            for pod in owned:
                if pod["metadata"]["labels"]["training.kubeflow.org/job-name"] not in names:
                    self._delete(pod["metadata"]["name"])
            for job in jobs:
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
        job_name = job["metadata"]["name"]
        if self._refused(job, replica, name, template["spec"]):
            return
        port = self._ports.setdefault(job["metadata"]["uid"], free_port())
        node = index + (1 if replica == "Worker" and "Master" in job["spec"]["pytorchReplicaSpecs"] else 0)
        container = template["spec"]["containers"][0]
        mounted = self._mounted(name, template["spec"], container)
        if mounted is None:
            return  # as the kubelet, which waits for what is to be mounted
        command = [mounted.get(word, word) for word in container["command"]]
        command = [sys.executable if word == "python" else word.replace("$$", "$") for word in command]
        command[command.index("launch") + 1 : command.index("launch") + 1] = ["--address", f"127.0.0.{node + 2}"]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "LOCKSTEP_"))}
        env |= {item["name"]: item["value"].replace("$$", "$") for item in container["env"] if "value" in item}
        env |= injected(job, replica, index, "127.0.0.2", port)
        env |= {
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.folder),
        }  # a pod that is killed leaves its /tmp behind
        self.starts[name] = self.starts.get(name, 0) + 1
        process = subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        # A container shows the processes of its own pod alone; here the launcher's mark stands for that.
        beside = {**env, "LOCKSTEP_LAUNCHER": str(process.pid)}
        self.cluster.containers.there[name] = Container(beside, self.folder)
        lines: list[str] = []
        self.cluster.logs[name] = lines
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        self.pods[name] = _Pod(process, reader)
        labels = {
            **template["metadata"]["labels"], "training.kubeflow.org/job-name": job_name,
            "training.kubeflow.org/replica-type": replica.lower(), "training.kubeflow.org/replica-index": str(index),
        }  # fmt: skip
        self.cluster.put(
            "pods",
            {
                "metadata": {"name": name, "labels": labels, "uid": str(uuid.uuid4())}, "spec": {"nodeName": f"node-{node}"},
                "status": {
                    "phase": "Running",
                    "containerStatuses": [{"name": "pytorch", "restartCount": 0, "state": {"running": {}}}],
                },
            },
            self.namespace,
        )  # fmt: skip

    def _mounted(self, pod: str, spec: dict[str, Any], container: dict[str, Any]) -> dict[str, str] | None:
        """Mount path → a folder of this machine, of the ConfigMaps that a projected volume shows; None where one is missing."""
        found = {}
        for volume in spec.get("volumes", []):
            folder = self.folder / f"volume-{pod}-{volume['name']}"
            for source in volume.get("projected", {}).get("sources", []):
                held = self.cluster.get("configmaps", source["configMap"]["name"], self.namespace)
                if held is None:
                    return None
                folder.mkdir(exist_ok=True)
                for item in source["configMap"]["items"]:
                    (folder / item["path"]).write_bytes(base64.b64decode(held["binaryData"][item["key"]]))
                mount = next(item for item in container["volumeMounts"] if item["name"] == volume["name"])
                found[mount["mountPath"]] = str(folder)
        return found

    def _refused(self, job: dict[str, Any], replica: str, name: str, pod: dict[str, Any]) -> bool:
        """Whether the namespace refuses the pod: an event says so, the job gets no condition, and it is tried again."""
        if replica == "Worker" and "Master" in job["spec"]["pytorchReplicaSpecs"]:
            pod = {**pod, "initContainers": [INIT_CONTAINER]}
        found = violations(pod, self.security) if self.security else []
        if found:
            message = f'pods "{name}" is forbidden: violates PodSecurity "{self.security}:latest": {", ".join(found)}'
            event = {
                "metadata": {"name": f"{name}.refused"}, "type": "Warning", "reason": "FailedCreatePod", "message": message,
                "involvedObject": {"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]},
                "lastTimestamp": datetime.now(timezone.utc).isoformat(),
            }  # fmt: skip
            self.cluster.put("events", event, self.namespace)
        return bool(found)

    def _read(self, process: subprocess.Popen[bytes], lines: list[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            stamp = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"
            lines.append(f"{stamp} {raw.decode(errors='replace').rstrip()}")
        process.stdout.close()

    def _observe(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        process = self.pods[name].process
        code = process.poll()
        if code is None or pod["status"]["phase"] != "Running":
            return
        self.pods[name].reader.join(10)
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "finishedAt": datetime.now(timezone.utc).isoformat()}
        pod["status"] = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": "pytorch", "restartCount": 0, "state": {"terminated": ended}}],
        }
        self.cluster.put("pods", pod, self.namespace)

    def _delete(self, name: str) -> None:
        """TERM, the grace, KILL – and the object goes when the process has gone."""
        pod = self.pods.get(name)
        if pod is not None:
            pod.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.process.wait(60)
            self._kill_group(pod)
        self.cluster.remove("pods", name, self.namespace)

    @staticmethod
    def _kill_group(pod: _Pod) -> None:
        if pod.process.poll() is None:  # an id that was waited for may be somebody else's by now
            os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait(10)
        pod.reader.join(10)

    def lose(self, name: str) -> None:
        """The pod's node dies: everything in it is gone at once."""
        self._kill_tree(self.pods[name].process.pid)

    @staticmethod
    def _kill_tree(pid: int) -> None:
        """The launcher's ranks have sessions of their own, so they are found by their parent."""
        children = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    children.append(int(entry.name))
        for number in [pid, *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(90)
        for pod in self.pods.values():
            if pod.process.poll() is None:
                self._kill_tree(pod.process.pid)
            self._kill_group(pod)


def until(condition: Any, seconds: float, what: str) -> None:
    """Polls with a bound."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
