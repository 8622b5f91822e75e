"""A real SLURM on this machine: two nodes, each a slurmd in namespaces of its own. Shared by all tests of one kind.

The suite skips where SLURM or the rights for namespaces are missing, and fails instead where CI is set.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.backends.slurm import SlurmBackend
from jobs.spec import JobSpec
from tests.processes import PYTHON, ROOT, poll

HERE = Path(__file__).parent / "cluster"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip")
NEEDED_FOR_ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")


once = pytest.mark.parametrize("cluster", ["accounting"], indirect=True)
"""For a test whose answer cannot depend on accounting."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `node` crashes or restarts one of its nodes, or the controller (`ctl`)."""

    folder: Path
    accounting: bool

    def node(self, action: str, name: str) -> None:
        subprocess.run([HERE / "node.sh", action, name, self.folder], check=True, capture_output=True, timeout=60)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def idle(self) -> None:
        """Waits until both nodes are free again."""

        def free() -> bool:
            states = self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split()
            return states == ["idle", "idle"]

        poll(free, 60, "both nodes are idle")


def _missing(accounting: bool) -> str | None:
    if os.geteuid() != 0:
        return "a cluster of namespaces needs root"
    needed = (*NEEDED, *NEEDED_FOR_ACCOUNTING) if accounting else NEEDED
    gone = [name for name in needed if shutil.which(name) is None]
    if gone:
        return f"{', '.join(gone)} not installed: apt-get install slurm-wlm slurmdbd mariadb-server munge iproute2"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, timeout=30)
    return None if probe.returncode == 0 else "namespaces are not permitted here (CAP_SYS_ADMIN)"


def _free_ports() -> int:
    """The first of 20 ports in a row that nobody uses, below those that jobs under SLURM take."""
    for base in random.sample(range(10000, 11980, 20), 50):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(base, base + 20):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


@pytest.fixture(scope="session", params=["accounting", "bare"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Started once for all tests with accounting, and once for all without."""
    accounting = request.param == "accounting"
    reason = _missing(accounting)
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-", dir="/tmp"))  # sockets need a short path
    number = random.randrange(256)
    env = {
        **os.environ, "BASE_PORT": str(_free_ports()), "SUBNET": f"198.19.{number}", "LINK": f"minislurm{number}",
        "ACCOUNTING": str(int(accounting)), "SLURMD_TIMEOUT": "6", "GRACE_TIME": "25",
    }  # fmt: skip
    # A test run that is killed cannot clean up: this does, when its process is gone.
    watch = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; exec "$1" "$2" --purge'
    guard = subprocess.Popen(
        ["bash", "-c", watch, str(os.getpid()), str(HERE / "down.sh"), str(folder)], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        done = subprocess.run([HERE / "up.sh", folder], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        yield Cluster(folder, accounting)
    finally:
        subprocess.run([HERE / "down.sh", folder, "--purge"], capture_output=True, timeout=60)
        guard.kill()
        guard.wait()


@dataclass
class Bench:
    """A backend on the cluster, and a folder for its runs."""

    cluster: Cluster
    backend: SlurmBackend
    folder: Path
    data_root: Path

    def command(self, name: str, program: str, **more: Any) -> JobSpec:
        """A job of one node and two ranks that run `python -c PROGRAM`."""
        values = {
            "name": name, "command": [PYTHON, "-c", program], "nodes": 1, "ranks_per_node": 2, "max_restarts": 0,
            "run_dir": str(self.folder / name), "grace_seconds": 5, "memory": "2Gi", **more,
        }  # fmt: skip
        return JobSpec.of(values)


@pytest.fixture
def bench(
    cluster: Cluster, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:  # fmt: skip
    monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "etc/slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    backend = SlurmBackend(interval=0.3)
    try:
        yield Bench(cluster, backend, tmp_path, data_root)
    finally:
        subprocess.run(["scancel", "--me"], capture_output=True, timeout=60)
        cluster.idle()
