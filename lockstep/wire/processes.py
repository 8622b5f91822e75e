"""What the system says of a process: its state, and the environment that it was started with."""

from __future__ import annotations

import os
from pathlib import Path


def stat_of(pid: int | str) -> list[str]:
    """The fields of proc_pid_stat(5) behind the name of the program: 0 is the state, 1 the parent, 3 the session, 19 when it was started,
    in clock ticks. [] where there is no such process; "self" is this one."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def variables_of(pid: int) -> dict[str, str]:
    """The environment of a process of this user (Linux); {} where it has ended, or is another user's.

    Any process may name any job, rank and launcher in its environment, and what to load besides.
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
