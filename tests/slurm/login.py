"""A login node for tests: a real sshd in front of the real SLURM, with separate files.

The login node sees the cluster's folder, but no file of the laptop. The laptop sees an empty folder of that name.
The laptop's only program is ssh.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.processes import PYTHON, ROOT, free_port, poll, processes
from tests.product import JobSpec
from tests.slurm.conftest import Cluster, lockstep, needs

SSHD = "/usr/sbin/sshd"
HOST = "login.example"
AT = f"{HOST}:{PYTHON}"
"""The login node, with its Python that has Lockstep."""
NEEDED = (SSHD, "ssh", "ssh-keygen", "tcsh", "fish", "unshare", "nsenter")
START = """
set -eu
mount --bind "$1" "$2"
mount -t tmpfs -o mode=755 laptop "$3"
mount --bind "$1/passwd" /etc/passwd
mount -t tmpfs -o mode=755 run /run
mkdir /run/sshd
exec /usr/sbin/sshd -D -e -f "$1/sshd_config" 2>> "$1/sshd.log"
"""


def _key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)
    return path


class Login:
    """The login node, and the laptop that knows it.

    `there` is the cluster folder's path on the nodes, and `local` its path here.
    """

    def __init__(self, folder: Path, there: Path, conf: str) -> None:
        self.there, self.local, self.laptop = there, folder / "cluster", folder / "laptop"
        for path in (self.local / "home", self.laptop / "bin", self.laptop / "home"):
            path.mkdir(parents=True)
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        host, key = _key(self.local / "host_key"), _key(self.laptop / "key")
        shutil.copy(f"{key}.pub", self.local / "authorized_keys")
        users = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        root = f"root:x:0:0:root:{self.there}/home:/bin/bash"
        (self.local / "passwd").write_text("\n".join([root, *users, ""]))
        (self.local / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.there}/host_key\nUsePAM no\nPidFile none\n"
            f"StrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"AuthorizedKeysFile {self.there}/authorized_keys\nPrintMotd no\nLogLevel ERROR\n"
            f"SetEnv PYTHONPATH={ROOT} SLURM_CONF={conf} CUDA_VISIBLE_DEVICES=\n"
        )
        self.knows(Path(f"{host}.pub").read_text())
        (self.laptop / "config").write_text(
            f"Host {HOST} *.example\n HostName 127.0.0.1\n Port {self.port}\n User root\n IdentityFile {key}\n"
            f" IdentitiesOnly yes\n IdentityAgent none\n UserKnownHostsFile {self.laptop}/known_hosts\n"
            " GlobalKnownHostsFile none\n"
        )
        ssh = self.laptop / "bin/ssh"
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.laptop}/config "$@"\n')
        ssh.chmod(0o755)

    def knows(self, key: str) -> None:
        """Sets the host key that the laptop knows."""
        (self.laptop / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}")

    def start(self) -> None:
        command = ["/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        self._process = subprocess.Popen(
            [*command, START, "sh", self.local, self.there, self.laptop], env=env, start_new_session=True
        )

        def up() -> bool:
            words = [self.laptop / "bin/ssh", "-o", "BatchMode=yes", "--", HOST, "exit 7"]
            return subprocess.run(words, capture_output=True, timeout=30).returncode == 7

        poll(up, 30, "the sshd", pause=0.1)

    def stop(self) -> None:
        """Stops the sshd, so that connections get no answer."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
        self._process = None

    def drop(self) -> int:
        """Cuts all connections and returns their number. The sshd accepts new connections."""
        pids = self.connections()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        poll(lambda: not {*pids} & {*self.connections()}, 60, "the end of the connections")
        return len(pids)

    def connections(self) -> list[int]:
        """Returns the sshd's processes that serve a connection."""
        assert self._process is not None
        family = [self._process.pid]
        parents = [(pid, parent) for pid, state, parent, _ in processes() if state != "Z"]
        for member in family:
            family += [pid for pid, parent in parents if parent == member]
        pids = []
        for pid in family:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith((b"sshd: root", b"sshd-session: root")):
                    pids.append(pid)
        return pids


@contextlib.contextmanager
def mounted(cluster: Cluster, local: Path) -> Iterator[Path]:
    """Mounts the folder at a path that exists on the nodes only."""
    there = Path(tempfile.mkdtemp(prefix="lockstep-cluster-", dir="/"))
    nodes = [(cluster.folder / f"run/node{n}.pid").read_text().split()[0] for n in (1, 2)]
    inside = [next(pid for pid, _, parent, _ in processes() if parent == int(node)) for node in nodes]
    local.mkdir(parents=True, exist_ok=True)
    try:
        for pid in inside:
            subprocess.run(["nsenter", "-m", "-t", str(pid), "mount", "--bind", local, there], check=True, timeout=30)
        yield there
        assert list(there.iterdir()) == [], "the laptop has no such folder: nothing is written there"
    finally:
        for pid in inside:
            subprocess.run(["nsenter", "-m", "-t", str(pid), "umount", "-l", there], capture_output=True, timeout=30)
        shutil.rmtree(there)


@dataclass
class Laptop:
    """A laptop whose jobs go to a login node."""

    login: Login
    folder: Path

    def spec(self, name: str, program: str, **more: Any) -> JobSpec:
        slurm = {"host": HOST, "python": PYTHON, **more.pop("slurm", {})}
        values = {
            "name": name, "command": [PYTHON, "-c", program], "nodes": 1, "ranks_per_node": 2, "max_restarts": 0,
            "run_dir": f"runs/{name}", "grace_seconds": 5, "memory": "2Gi", "slurm": slurm, **more,
        }  # fmt: skip
        return JobSpec.of(values)

    def file(self, spec: JobSpec) -> str:
        path = self.folder / f"{spec.name}.yaml"
        path.write_text(json.dumps(spec.plain()))
        return str(path)

    def submit(self, spec: JobSpec) -> None:
        done = lockstep("submit", "slurm", self.file(spec))
        assert done.returncode == 0, done


@contextlib.contextmanager
def laptop(cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Laptop]:
    """Starts the login node, and sets the laptop's environment."""
    needs(*NEEDED, packages="openssh-server tcsh fish")
    conf = str(cluster.folder / "etc/slurm.conf")
    monkeypatch.setenv("SLURM_CONF", conf)
    with mounted(cluster, folder / "cluster") as there:
        login = Login(folder, there, conf)
        here = {
            "PATH": str(login.laptop / "bin"), "HOME": str(login.laptop / "home"),
            "LOCKSTEP_HOME": str(login.laptop / "lockstep"), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        try:
            login.start()
            with pytest.MonkeyPatch.context() as patch:
                for name, value in here.items():
                    patch.setenv(name, value)
                for name in ("SLURM_CONF", "SSH_AUTH_SOCK", "LOCKSTEP_SLURM_HOST"):
                    patch.delenv(name, raising=False)
                yield Laptop(login, folder)
        finally:
            login.stop()
        subprocess.run(["scancel", "--me"], capture_output=True, timeout=60)
        cluster.idle()
