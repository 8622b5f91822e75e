"""python -m jobs.backends.supervise FOLDER: keeps a local job's process, its time limit and its exit code.

Somebody must be there to collect the exit code when the command that submitted the job is long gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from training import files

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


def main(folder: Path) -> int:
    job = json.loads((folder / "job.json").read_bytes())
    child = subprocess.Popen(job["command"], env={**os.environ, **job["env"]}, start_new_session=True)

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
    files.replace_json(folder / ENDED, {"code": code, "timed_out": timed_out})
    return 0


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
