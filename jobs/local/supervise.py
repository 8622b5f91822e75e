"""python -m lockstep.jobs.local.supervise FOLDER: keeps a local job's processes, its time limit and its exit code.

The supervisor collects the exit code long after the command that submitted the job has ended. It forwards TERM and INT to the
launcher, and kills the processes that live after the grace period.

A process of the job descends from the supervisor (Linux), also in its own session. If its parent ends, it becomes a child of the
supervisor instead of init's. If the supervisor is killed, the kernel kills the launcher, and with it its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.training import contract
from lockstep.training.cli import search_path
from lockstep.wire.progress import stat_of

from .. import records  # at the start: the version that ran a job must record its end

RUNNING = "running.json"
ENDED = "ended.json"
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
MODULE = "lockstep.jobs.local.supervise"
"""Name of this module in the command line of its process."""
POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""Seconds to wait for a process after a KILL. A process that the kernel holds longer (state D) may never end."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Asks the kernel (Linux) for the death signal of this process, or to adopt the descendants whose own parents end."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _begin_as_launcher(supervisor: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it was killed before the kernel was asked
        os._exit(contract.EXIT_FAILED)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def start_ticks(pid: int) -> int | None:
    """Returns when a process began, in clock ticks since boot, to tell it from a later process with the same id (Linux)."""
    fields = stat_of(pid)
    return int(fields[19]) if len(fields) > 19 else None


def alive(pid: int, ticks: int | None) -> bool:
    """Returns whether the process with this id and these ticks still runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError, OverflowError):
        return False
    fields = stat_of(pid)
    if fields[:1] == ["Z"]:  # ended, and its exit code is not collected yet
        return False
    return ticks is None or start_ticks(pid) == ticks


def descendants(root: int) -> list[int]:
    """Returns the live processes below `root`, without other jobs that these processes have submitted."""
    # A process that forks and ends while /proc is being read may be missed with its child, but not twice.
    return _below(root) or _below(root)


def _below(root: int) -> list[int]:
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    table = {int(name): fields for name in names if name.isdigit() and (fields := stat_of(int(name)))}
    pids = [root]
    for parent in pids:  # the list grows during the loop
        pids += [pid for pid, fields in table.items() if int(fields[1]) == parent and not _is_supervisor(pid)]
    return [pid for pid in pids[1:] if table[pid][0] != "Z"]


def _is_supervisor(pid: int) -> bool:
    try:
        return MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or is another user's
        return False


def send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill_descendants() -> None:
    """Sends KILL until no process lives below this one, for `KILL_SECONDS` at most."""
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        send(pids, signal.SIGKILL)  # in every round: processes may fork between the listing and the signal
        time.sleep(POLL_SECONDS)


def end_of(run_dir: str, job: str, code: int | None, timed_out: bool = False) -> records.LocalEnd:
    """Returns how a job ended, when no process of it lives. The run's own status.json counts above `code`, the launcher's exit code."""
    status = records.reported(Path(run_dir), job)
    reason = ""
    if status is not None and status.code is not None:
        code, reason = status.code, status.reason
    over = timed_out and code not in (contract.EXIT_DONE, contract.EXIT_USAGE)
    return records.LocalEnd(code=code, reason=reason, timed_out=over, job=job)


def here() -> str:
    """Returns this machine and its process namespace: pids have a meaning only there."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def main(folder: Path) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if sys.stdin.buffer.read(len(b"start")) != b"start":
        return contract.EXIT_FAILED  # the command that submits was killed
    job = json.loads((folder / records.JOB).read_bytes())
    env = {**os.environ, "PATH": search_path(os.environ), **job["env"], contract.ENV_JOB: job["job"]}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would hide the launcher's end
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    launcher = subprocess.Popen(
        job["command"], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=functools.partial(_begin_as_launcher, os.getpid()),
    )  # fmt: skip
    records.Process(pid=launcher.pid, ticks=start_ticks(launcher.pid)).write(folder / RUNNING)
    code, timed_out = wait_for_end(launcher, job["time_limit"], job["grace"])
    with contextlib.suppress(OSError):  # a full disk: each query computes the end again
        end_of(job["run_dir"], job["job"], code, timed_out).write(folder / ENDED)
    return 0


def wait_for_end(launcher: subprocess.Popen[bytes], time_limit: float, grace: float) -> tuple[int, bool]:
    """Waits until no process of the job lives. Returns the launcher's exit code, and whether the time limit ended the job.

    A request to end and the time limit begin the grace period. The processes that a killed launcher left have it, too.
    """
    limit, deadline, asked, signalled = time.monotonic() + time_limit, math.inf, False, set[int]()
    timed_out = False
    while True:
        _reap(launcher)
        now, rest = time.monotonic(), []
        if launcher.returncode is not None:
            rest = descendants(os.getpid())
            if not rest:
                return launcher.returncode, timed_out
            deadline = min(deadline, now + grace)
            if asked:  # the launcher has signalled its ranks, but not the processes that these have started
                send([pid for pid in rest if pid not in signalled], signal.SIGTERM)
                signalled.update(rest)
        elif now >= limit and not asked:
            timed_out = asked = True
            deadline = now + grace
            send([launcher.pid], signal.SIGTERM)
        if now >= deadline:
            _kill_descendants()  # the loop waits for processes that survive this: until then the job has not ended
        # The end of a process that is no child sends no notification.
        seconds = POLL_SECONDS if rest else max(POLL_SECONDS, (deadline if asked else limit) - now)
        received = signal.sigtimedwait(_SIGNALS, seconds)
        if received is not None and received.si_signo != signal.SIGCHLD:
            asked, deadline = True, min(deadline, time.monotonic() + grace)
            if launcher.returncode is None:
                send([launcher.pid], received.si_signo)


def _reap(launcher: subprocess.Popen[bytes]) -> None:
    """Collects the exit codes of the launcher and of orphans, which have no other parent."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == launcher.pid:
                launcher.returncode = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:  # there is no child any more
        if launcher.returncode is None:
            launcher.returncode = contract.EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
