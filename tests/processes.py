"""Real processes for tests: each has a new process group and a time limit, and is killed at the end."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
LOCKSTEP = str(Path(PYTHON).parent / "lockstep")
LAUNCH = (PYTHON, "-m", "lockstep.training", "launch")
EXCHANGE = """
import ctypes, random, sys, time
libc = ctypes.CDLL(None, use_errno=True)
first, second = (name.encode() for name in sys.argv[1:])
print("ready", flush=True)
while True:
    libc.renameat2(-100, first, -100, second, 2)
    time.sleep(random.uniform(0, 0.001))
"""
"""A program that exchanges two names in a folder until it is killed; it says "ready" first. Linux only."""


def clean_env(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher or a cluster may have set."""
    prefixes = ("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_", "LOCKSTEP_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    names |= {"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}  # a laptop does not set them
    variables = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(prefixes)}
    return {
        **variables, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "CUDA_VISIBLE_DEVICES": "",
        "LOCKSTEP_METRICS_PORT": "0",  # any free one: other tests may run on this machine
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores from those they wait for
        **extra,
    }  # fmt: skip


def require(condition: object, reason: str) -> None:
    """Skips the test with a reason; in CI, where everything has to be there, it fails."""
    if not condition:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def processes() -> Iterator[tuple[int, str, int, int]]:
    """(process, state, parent, session) of each process there is, from /proc."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
                yield int(entry), fields[0], int(fields[1]), int(fields[3])


def state_of(pid: int) -> str:
    """Returns the state of a process, such as T of a stopped one; "": it is gone."""
    return next((state for one, state, *_ in processes() if one == pid), "")


def handles_term(pid: int, how: str) -> bool:
    """Returns whether a process blocks (`SigBlk`) or catches (`SigCgt`) SIGTERM."""
    mask = re.search(rf"^{how}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return mask is not None and bool(int(mask[1], 16) >> (signal.SIGTERM - 1) & 1)


def inside(folder: Path) -> list[int]:
    """Returns the processes whose current folder it is."""
    pids = []
    for pid, state, _, _ in processes():
        with contextlib.suppress(OSError):
            pids += [pid] if state != "Z" and os.readlink(f"/proc/{pid}/cwd") == str(folder) else []
    return pids


def rank_of(pid: int) -> int | None:
    """Returns the rank that a launcher gave a process, None of another process."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes()
        words += Path(f"/proc/{pid}/comm").read_bytes()  # of a forked rank: tests/warm/launcher.py
        if (match := re.search(rb"(?:^|\0)RANK=(\d+)[\0\n]", words)) is not None:
            return int(match[1])
    return None


def ranks_of(launcher: int) -> dict[int, int]:
    """Returns rank → process, of a launcher's ranks that live."""
    children = [pid for pid, state, parent, _ in processes() if parent == launcher and state != "Z"]
    return {rank: pid for pid in children if (rank := rank_of(pid)) is not None}


def kill_inside(folder: Path) -> None:
    """Kills each process whose current folder it is, as a power cut does."""
    while pids := inside(folder):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def assert_none_inside(folder: Path) -> None:
    """Waits for the end of the processes whose current folder it is. The test fails for those that do not end, and they are killed."""
    try:
        poll(lambda: not inside(folder), what=f"the end of every process in {folder}")
    finally:
        kill_inside(folder)


@dataclass
class Result:
    code: int
    output: str
    error: str = ""
    """Standard error, where it was kept apart."""


_leases: list[socket.socket] = []


def free_port() -> int:
    """Returns an unused port, which no other test process on this machine gets while this one lives.

    Nothing listens on it before the test does, so a separate name reserves it, which goes with this process. It is below
    the ports that the kernel gives by itself.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        lease = socket.socket(socket.AF_UNIX)
        try:
            lease.bind(f"\0lockstep-test-port-{port}")
        except OSError:
            lease.close()
            continue
        _leases.append(lease)
        return port


@contextlib.contextmanager
def started(
    command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT, stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed at the end with all that it has started. `stderr=subprocess.PIPE` keeps its streams apart."""
    process = subprocess.Popen(
        command, env=env or clean_env(), cwd=cwd, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=stderr, preexec_fn=hear_of_the_terminal,
    )  # fmt: skip
    try:
        yield process
    finally:
        _kill_family(process.pid)
        process.wait(60)
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()


def hear_of_the_terminal() -> None:
    """The tests may run under nohup, or in the background of a script: a program would inherit that HUP or INT is ignored."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _kill_family(pid: int) -> None:
    """Kills the process, its group and its descendants: torchrun starts each rank in a new session."""
    children: dict[int, list[int]] = {}
    for child, _, parent, _ in processes():
        children.setdefault(parent, []).append(child)
    family = [pid]
    for member in family:  # grows while it is read
        family += children.get(member, [])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for member in family[1:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)


def run(command: list[str], env: dict[str, str] | None = None, timeout: float = 240, cwd: Path = ROOT) -> Result:
    """Runs to the end. A process that hangs is killed and fails the test with what it had printed."""
    with started(command, env, cwd) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill_family(process.pid)
            output, _ = process.communicate(timeout=60)
            raise AssertionError(f"still running after {timeout} s: {' '.join(command)}\n{output}") from None
        return Result(process.returncode, output)


def poll(
    condition: Callable[[], object], timeout: float = 120, what: str = "condition", pause: float = 0.02
) -> None:  # fmt: skip
    """Returns as soon as the condition holds; fails after the bound. `pause`: longer where the condition costs a process."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout} s"
        time.sleep(pause)
