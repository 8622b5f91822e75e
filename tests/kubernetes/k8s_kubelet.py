"""Emulates the kubelet, twice: pods that are real processes, and pods without a process.

One machine stands for all nodes, so each launcher gets a separate loopback address and the rendezvous a free port.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from k8s_cluster import Cluster

from tests.processes import ROOT, free_port, processes

Object = dict[str, Any]
ZONE = timezone(timedelta(hours=2))
"""Time zone of the nodes: the runtime stamps lines with its offset."""
Variables = Callable[[str, int], dict[str, str]]
"""(address, port) of the rendezvous → environment variables that the operator adds to the container."""


def running_status(name: str, moment: str) -> Object:
    times = {"status": "True", "lastTransitionTime": moment}
    return {
        "phase": "Running",
        "conditions": [{"type": kind, **times} for kind in ("PodScheduled", "Ready", "ContainersReady")],
        "containerStatuses": [{"name": name, "restartCount": 0, "state": {"running": {}}}],
    }


class Idle:
    """Pods run until a test ends them. No process is started."""

    def mounts(self, name: str, spec: Object) -> dict[str, str] | None:
        return {}

    def ended(self, *_: Any) -> Any:
        """Returns None: the container runs. The other methods do nothing, too."""

    start = end = stop = ended


def _inside(mounted: dict[str, str], word: str) -> str:
    """Returns a command's argument with the mount path replaced by the local folder."""
    for path, folder in mounted.items():
        if word == path or word.startswith(f"{path}/"):
            return folder + word.removeprefix(path)
    return word


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    reader: threading.Thread


class Processes(Idle):
    """Every pod is a real launcher with real ranks. No process survives `stop()`."""

    def __init__(self, cluster: Cluster, folder: Path, namespace: str = "team") -> None:
        self.cluster, self.folder, self.namespace = cluster, folder, namespace
        self.pods: dict[str, _Running] = {}
        self.starts: dict[str, int] = {}
        self._ports: dict[str, int] = {}

    def mounts(self, name: str, spec: Object) -> dict[str, str] | None:
        """Returns mount path → local folder. A run directory in an emptyDir begins empty. A projected volume has the files of
        ConfigMaps. None: a ConfigMap is missing."""
        folders = {}
        for volume in spec.get("volumes", []):
            folder = self.folder / f"volume-{name}-{volume['name']}"
            if volume == {"name": "run", "emptyDir": {}}:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                mount = next(each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "run")
                folders[mount["mountPath"]] = str(folder)
            for source in volume.get("projected", {}).get("sources", []):
                config_map = self.cluster.get("configmaps", source["configMap"]["name"], self.namespace)
                if config_map is None:
                    return None
                folder.mkdir(exist_ok=True)
                for item in source["configMap"]["items"]:
                    (folder / item["path"]).write_bytes(base64.b64decode(config_map["binaryData"][item["key"]]))
                mount = next(each for each in spec["containers"][0]["volumeMounts"] if each["name"] == volume["name"])
                folders[mount["mountPath"]] = str(folder)
        return folders

    def start(self, pod: Object, node: int, job: str, mounted: dict[str, str], variables: Variables) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        command = [_inside(mounted, word) for word in container["command"]]
        command = [sys.executable if word == "python" else word.replace("$$", "$") for word in command]
        serves = "--serve" if node == 0 else "--no-serve"  # on a real node the host's name decides this
        at = command.index("launch") + 1
        command[at:at] = ["--address", f"127.0.0.{node + 2}", serves]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "LOCKSTEP_"))}
        env |= {item["name"]: item["value"].replace("$$", "$") for item in container["env"] if "value" in item}
        env |= {
            item["name"]: self._secret(**item["valueFrom"]["secretKeyRef"])
            for item in container["env"]
            if "valueFrom" in item
        }
        env |= variables("127.0.0.2", self._ports.setdefault(job, free_port()))
        env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)}  # a pod that is killed leaves its /tmp behind
        process = subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        # A container shows only its pod's processes. Here LOCKSTEP_LAUNCHER marks them.
        self.cluster.kubectl.put(name, {**env, "LOCKSTEP_LAUNCHER": str(process.pid)}, self.folder)
        lines: list[str] = []
        self.cluster.logs[name] = lines
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        self.pods[name] = _Running(process, reader)
        self.starts[name] = self.starts.get(name, 0) + 1  # last: a test that sees the count finds the pod

    def _secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.cluster.get("secrets", name, self.namespace)["data"][key]).decode()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: list[str]) -> None:
        for raw in process.stdout:
            stamp = datetime.now(ZONE).isoformat(timespec="microseconds")
            lines.append(f"{stamp} {raw.decode(errors='replace').rstrip()}")
        process.stdout.close()

    def ended(self, pod: Object) -> int | None:
        """Returns the container's exit code; None while it runs."""
        running = self.pods[pod["metadata"]["name"]]
        code = running.process.poll()
        if code is None:
            return None
        running.reader.join(10)
        return 128 - code if code < 0 else code

    def end(self, name: str) -> None:
        """Sends TERM, waits for the grace period, and sends KILL."""
        running = self.pods.get(name)
        if running is not None:
            running.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(60)
            self._kill_group(running)

    @staticmethod
    def _kill_group(running: _Running) -> None:
        if running.process.poll() is None:  # the id of a reaped process may belong to another process
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)
        running.reader.join(10)

    def lose(self, name: str) -> None:
        """Kills all processes of the pod at once."""
        kill_tree(self.pods[name].process.pid)

    def stop(self) -> None:
        for running in self.pods.values():
            if running.process.poll() is None:
                kill_tree(running.process.pid)
            self._kill_group(running)


def kill_tree(pid: int) -> None:
    """Kills a launcher and its ranks. The ranks have separate sessions, so their parent identifies them."""
    for number in [pid, *(child for child, _, parent, _ in processes() if parent == pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
