"""python -m lockstep.jobs.local.supervise FOLDER: keeps a local job's processes, its time limit and its exit code.

Somebody must be there to collect the exit code when the command that submitted the job is long gone. A TERM or INT is
handed on to the launcher, and begins the end of the job: what lives after the grace is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.jobs import records
from lockstep.jobs.local.processes import POLL_SECONDS, adopt_orphans, kill, living, send, start_ticks
from lockstep.training import contract, files

RUNNING = "running.json"
ENDED = "ended.json"
_HEARD = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def note_end(folder: Path, job: Mapping[str, Any], code: int | None, timed_out: bool = False) -> records.Ended:
    """Records how a job ended, once, when no process of it lives any more. What the run itself says counts above `code`.

    Args:
        code: the launcher's; None for who only asks, and finds the same again: it does not wait for the disk.
    """
    write = files.replace if code is not None else files.publish
    said = records.said(Path(job["run_dir"]), job["job"])
    reason = ""
    if said is not None and said["code"] is not None:
        code, reason = said["code"], said["reason"]
    over = timed_out and code not in (contract.EXIT_DONE, contract.EXIT_USAGE)
    ended: records.Ended = {"code": code, "reason": reason, "timed_out": over, "job": job["job"]}
    now = files.read_json(folder / "job.json")
    if isinstance(now, dict) and now.get("job") == job["job"]:  # not submitted again meanwhile
        with contextlib.suppress(OSError):  # a full disk: the next one who asks tries again
            write(folder / ENDED, (files.json_text(ended, indent=1) + "\n").encode())
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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, nobody would hear of the launcher's end
    adopt_orphans()
    launcher = subprocess.Popen(job["command"], env=env, start_new_session=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # not before: the launcher would inherit it
    files.replace_json(folder / RUNNING, {"pid": launcher.pid, "ticks": start_ticks(launcher.pid)})
    code, timed_out = see_to_its_end(launcher, job["job"], job["time_limit"], job["grace"])
    note_end(folder, job, code, timed_out)
    return 0


def see_to_its_end(launcher: subprocess.Popen[bytes], job: str, time_limit: float, grace: float) -> tuple[int, bool]:
    """Returns when no process of the job lives: the launcher's exit code, and whether the time limit ended the job.

    Whoever asks for the end, and the time limit, begin the grace; what a killed launcher left has it, too, to save.
    """
    limit, deadline, asked, told = time.monotonic() + time_limit, math.inf, False, set[int]()
    timed_out = False
    while True:
        _reap(launcher)
        now, rest = time.monotonic(), []
        if launcher.returncode is not None:
            rest = living(job, os.getpid())
            if not rest:
                return launcher.returncode, timed_out
            deadline = min(deadline, now + grace)
            if asked:  # the launcher has told its ranks, and nobody what these have started
                send([pid for pid in rest if pid not in told], signal.SIGTERM)
                told.update(rest)
        elif now >= limit and not asked:
            timed_out = asked = True
            deadline = now + grace
            send([launcher.pid], signal.SIGTERM)
        if now >= deadline:
            kill(job, os.getpid())  # what lives even then is waited for: until then the job has not ended
        # There is no notification when a process ends that is not a child of this one.
        seconds = POLL_SECONDS if rest else max(POLL_SECONDS, (deadline if asked else limit) - now)
        heard = signal.sigtimedwait(_HEARD, seconds)
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            asked, deadline = True, min(deadline, time.monotonic() + grace)
            if launcher.returncode is None:
                send([launcher.pid], heard.si_signo)


def _reap(launcher: subprocess.Popen[bytes]) -> None:
    """Takes the exit codes of the launcher and of orphans, which nobody asks for."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == launcher.pid:
                launcher.returncode = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:  # there is no child any more
        if launcher.returncode is None:
            launcher.returncode = contract.EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
