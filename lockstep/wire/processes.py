"""Facts about processes of this machine, from Linux' /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def stat_of(pid: int | str) -> list[str]:
    """Returns the fields of proc_pid_stat(5) behind the name of the program. 0 is the state, 1 the parent, 3 the session, 19 the start
    in clock ticks. Returns [] if there is no such process. "self" names this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def variables_of(pid: int) -> dict[str, str]:
    """Returns the environment of a process of this user (Linux); {}: it has ended, or belongs to another user.

    Any process may name any job, rank and launcher in its environment, and code to load, so callers must not trust the values.
    """
    try:
        # The descriptor belongs to this very process, also after its id is given to another one.
        folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return {}
    try:
        status, environ = (_of_process(folder, name) for name in ("status", "environ"))
    except OSError:
        return {}
    finally:
        os.close(folder)
    users = next((line.split()[1:] for line in status.split(b"\n") if line.startswith(b"Uid:")), [])
    if set(users) != {str(os.geteuid()).encode()}:  # real, effective, saved, of the file system
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in environ.split(b"\0") if b"=" in entry)


def _of_process(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
        return file.read()


def state_of(pid: int | str) -> str:
    """Returns R: the process runs. S: it waits. D: it waits for a disk or a device. T: it is stopped (proc_pid_stat(5)). "": it is gone."""
    return next(iter(stat_of(pid)), "")


def children(pid: int) -> list[int]:
    """Returns the processes that this process has started, such as those of its data loader."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return pids
