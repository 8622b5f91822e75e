"""python -m jobs.local.supervise FOLDER: keeps a local job's process, its time limit and its exit code.

Somebody must be there to collect the exit code when the command that submitted the job is long gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from jobs import records
from training import contract, files

RUNNING = "running.json"
ENDED = "ended.json"


def start_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: tells it from a later one with the same id (Linux)."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def alive(pid: int, ticks: int | None) -> bool:
    """Whether that very process still runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    fields = _stat(pid)
    if fields[:1] == ["Z"]:  # ended; only nobody has asked for its exit code yet
        return False
    return ticks is None or start_ticks(pid) == ticks


def living(job: str) -> list[int]:
    """The processes of a job: what has its identity in its environment, whoever started it (Linux). Not this one."""
    mark, found = f"{contract.ENV_JOB}={job}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in path.read_bytes().split(b"\0") and _stat(int(path.parent.name))[:1] not in ([], ["Z"]):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def signal_all(job: str, number: int) -> None:
    """To every process of the job that lives."""
    for pid in living(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def note_end(folder: Path, job: dict[str, Any], code: int | None, timed_out: bool = False) -> dict[str, Any]:
    """Records how a job ended, once, when no process of it lives any more. What the run itself says counts above `code`."""
    said = records.said(Path(job["run_dir"]), job["job"])
    reason = ""
    if said is not None and said["code"] is not None:
        code, reason = said["code"], said["reason"]
    over = timed_out and code not in (contract.EXIT_DONE, contract.EXIT_USAGE)
    ended = {"code": code, "reason": reason, "timed_out": over, "job": job["job"]}
    now = files.read_json(folder / "job.json")
    if isinstance(now, dict) and now.get("job") == job["job"]:  # not submitted again meanwhile
        with contextlib.suppress(OSError):  # a full disk: the next one who asks tries again
            files.replace_json(folder / ENDED, ended)
    return ended


def here() -> str:
    """This machine, and which processes of it are seen: pids mean something only there."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def main(folder: Path) -> int:
    job = json.loads((folder / "job.json").read_bytes())
    env = {**os.environ, "PATH": contract.search_path(os.environ), **job["env"], contract.ENV_JOB: job["job"]}
    child = subprocess.Popen(job["command"], env=env, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    files.replace_json(folder / RUNNING, {"pid": child.pid, "ticks": start_ticks(child.pid)})
    timed_out = False
    try:
        code = child.wait(job["time_limit"])
    except subprocess.TimeoutExpired:
        timed_out = True
        code = end(child, job["grace"])
    see_ended(job["job"], job["grace"])
    note_end(folder, job, code, timed_out)
    return 0


def see_ended(job: str, grace: float) -> None:
    """Waits for the ranks that a killed launcher left: they save. After the grace they are killed."""
    deadline = time.monotonic() + grace
    while living(job):
        if time.monotonic() >= deadline:
            signal_all(job, signal.SIGKILL)
        time.sleep(0.05)


def end(child: subprocess.Popen[bytes], grace: float) -> int:
    """TERM, the grace, then KILL for the whole session."""
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
