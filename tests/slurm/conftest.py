"""Real SLURM clusters on this machine, one with accounting. Each of the two nodes is a slurmd in separate namespaces.

Without SLURM or the right to create namespaces the suite skips; where CI is set, it fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.processes import PYTHON, ROOT, poll, require
from tests.product import JobSpec, Status
from tests.slurm.stand_ins import site  # noqa: F401 - a fixture

HERE = Path(__file__).parent / "cluster"
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip", "slurmdbd", "sacctmgr", "mariadbd")

accounted = pytest.mark.parametrize("cluster", ["accounting"], indirect=True)
"""Runs a test on the cluster with accounting. submitit alone asks only the accounting.

All other tests run without accounting: the controller and the job's files are the only sources.
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `node` crashes or restarts one of its nodes, or the controller (`ctl`)."""

    folder: Path

    def node(self, action: str, name: str) -> None:
        subprocess.run([HERE / "node.sh", action, name, self.folder], check=True, capture_output=True, timeout=60)

    def ask(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def log_lines(self, job_id: str) -> list[str]:
        """Returns what the controller and the nodes logged about a job."""
        lines = [
            f"{path.stem}: {line}" for path in sorted((self.folder / "log").glob("*.log"))
            for line in path.read_text(errors="replace").splitlines() if job_id in line
        ]  # fmt: skip
        return lines[-200:]

    def idle(self) -> None:
        """Waits until both nodes are free again."""

        def free() -> bool:
            return self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split() == ["idle", "idle"]

        poll(free, 60, "both nodes are idle", pause=0.2)

    def forgets(self, *job_ids: str) -> None:
        """Makes the controller forget jobs that have ended, as it does by itself after MinJobAge."""
        path = self.folder / "etc/slurm.conf"
        before = path.read_text()
        path.write_text(re.sub(r"(?m)^MinJobAge=.*", "MinJobAge=2", before))

        def unknown(job_id: str) -> bool:
            answer = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True, timeout=60)
            return "Invalid job id" in answer.stderr

        try:
            self.node("reread", "ctl")
            poll(lambda: all(map(unknown, job_ids)), 60, "the controller has forgotten the jobs", pause=0.2)
        finally:
            path.write_text(before)
            self.node("reread", "ctl")


def needs(*programs: str, packages: str) -> None:
    """Skips without the programs, root or the right to create namespaces; in CI it fails."""
    require(os.geteuid() == 0, "namespaces need root")
    missing = [name for name in programs if shutil.which(name) is None]
    require(not missing, f"{', '.join(missing)} not installed: apt-get install {packages}")
    probe = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, timeout=30)
    require(probe.returncode == 0, "namespaces are not permitted here (CAP_SYS_ADMIN)")


def _free_ports(stack: contextlib.ExitStack) -> int:
    """Returns the first of 20 consecutive unused ports, below the ports of SLURM's jobs.

    The last port stays bound until the stack closes, so a parallel run of these tests takes other ports.
    """
    for base in random.sample(range(10000, 11980, 20), 50):
        with contextlib.ExitStack() as sockets:
            try:
                for port in range(base, base + 20):
                    sockets.enter_context(last_socket := socket.socket()).bind(("", port))
            except OSError:
                continue
            stack.enter_context(last_socket.dup())
            return base
    raise AssertionError("no free ports")


def _started(kind: str) -> Iterator[Cluster]:
    needs(*NEEDED, packages="slurm-wlm slurmdbd mariadb-server munge iproute2")
    folder = Path(f"/tmp/lockstep-slurm-{secrets.token_hex(4)}")  # sockets need a short path
    with contextlib.ExitStack() as stack:
        env = {
            **os.environ, "BASE_PORT": str(_free_ports(stack)), "ACCOUNTING": str(int(kind == "accounting")),
            "SLURMD_TIMEOUT": "6", "GRACE_TIME": "25",
        }  # fmt: skip
        # keep.sh stops the cluster at the end of its standard input, so also when the test run is killed.
        keeper = stack.enter_context(
            subprocess.Popen(
                [HERE / "keep.sh", folder], env=env, text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )
        )  # fmt: skip
        assert keeper.stdin is not None and keeper.stdout is not None
        try:
            lines = []
            for line in keeper.stdout:
                lines.append(line)
                if line == "up\n":
                    break
            assert lines[-1:] == ["up\n"], "".join(lines)
            yield Cluster(folder)
        finally:
            keeper.stdin.close()
            assert keeper.wait(60) == 0 and not folder.exists(), f"the cluster in {folder} is not gone"


@pytest.fixture(scope="session")
def accounting() -> Iterator[Cluster]:
    yield from _started("accounting")


@pytest.fixture(scope="session")
def bare() -> Iterator[Cluster]:
    yield from _started("bare")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Each cluster starts when a test first requests it, and stays up for the session."""
    instance: Cluster = request.getfixturevalue(getattr(request, "param", "bare"))
    return instance


@dataclass
class Bench:
    """A backend on the cluster, and a folder for its runs."""

    cluster: Cluster
    backend: Any
    folder: Path
    data_root: Path

    def command(self, name: str, program: str, **more: Any) -> JobSpec:
        """Returns a job of one node and two ranks that run `python -c PROGRAM`."""
        values = {
            "name": name, "command": [PYTHON, "-c", program], "nodes": 1, "ranks_per_node": 2, "max_restarts": 0,
            "run_dir": str(self.folder / name), "grace_seconds": 5, "memory": "2Gi", **more,
        }  # fmt: skip
        return JobSpec.of(values)

    def file(self, spec: JobSpec) -> Path:
        """Writes the spec as a job file."""
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(spec.plain()))
        return path

    def becomes(self, name: str, state: str, bound: float = 90, reason: str = "") -> None:
        """Waits until the job has this state and a reason that contains `reason`."""

        def has_state() -> bool:
            status = self.backend.status(name)
            return status.state == state and reason in status.reason

        poll(has_state, bound, f"{name}: {state} {reason}", pause=0.1)

    def alive(self, name: str) -> bool:
        """Returns whether a process of the job still runs. All nodes are on this machine."""
        mark = f"{self.backend.folder / name}/".encode()
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if mark in process.read_bytes():
                    return True
        return False

    def wait(self, name: str, bound: float = 120) -> Status:
        """Waits as the backend does, but a requeued job starts after two seconds, not after cred_expire's six.

        An earlier start fails: a node refuses credentials signed in the second in which the last start was revoked.
        And an srun that outlives its start would end the next start, whose step has the same number.
        """
        reasons: set[str] = set()

        def reschedule(status: Status) -> None:
            if (
                status.reason.endswith("waits for its start time")
                and status.reason not in reasons
                and not self.alive(name)
            ):
                reasons.add(status.reason)
                self.cluster.ask("scontrol", "update", f"jobid={self.job_id(name)}", "starttime=now+2")

        return self.backend.wait(name, bound, reschedule)

    def job_id(self, name: str) -> str:
        """Returns SLURM's id of the job."""
        return str(self.backend.require(name).handle.job_id)

    def note(self, *words: str) -> Path:
        """Returns a path in the backend's folder."""
        return Path(self.backend.folder, *words)

    def log(self, name: str) -> Path:
        """Returns the log of rank 0 and its task."""
        return self.note(name, f"submitit/{self.job_id(name)}_0_log.out")

    def signal(self, name: str) -> None:
        """Sends the signal that SLURM sends before it ends or preempts a job."""
        self.cluster.ask("scancel", "--signal=USR2", self.job_id(name))


LATER = {"patch": {"begin": "now+1hour"}}
"""A job that does not start."""


def lockstep(*words: str, bound: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs the command in a separate process."""
    program = "import sys; sys.argv[0] = 'lockstep'; from lockstep.jobs.cli.main import main; main()"
    return subprocess.run([PYTHON, "-c", program, *words], capture_output=True, text=True, timeout=bound)


@pytest.fixture
def bench(
    cluster: Cluster, tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:  # fmt: skip
    monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "etc/slurm.conf"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("LOCKSTEP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        yield Bench(cluster, product.slurm(), tmp_path, data_root)
    finally:
        subprocess.run(["scancel", "--me"], capture_output=True, timeout=60)
        cluster.idle()
