"""Services of the operating system: an allocator that keeps freed memory, the process's memory and connections, and an end without an
abort. Also tells which errors come from connections to other ranks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ..limits import FORK_LOOK_SECONDS, FORK_SECONDS

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""`mallopt` parameters, from glibc's malloc.h."""


def keep_freed() -> None:
    """Tells glibc's allocator not to return memory to the kernel. Does nothing if the C library is not glibc.

    By default glibc returns every large block at once. A training step on a CPU frees and allocates the same gigabytes of activations
    each time, and a fifth of its time goes into pages that the kernel clears again.

    Afterwards the process keeps the most memory that it ever had in use, plus fragmentation.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - musl has a mallopt too, which does nothing
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def resident_bytes() -> int | None:
    """Returns the bytes of this process in RAM now, by /proc/self/statm (proc(5)); None on systems other than Linux."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


Address = tuple[str, int]
Connections = dict[int, tuple[Address, Address]]
"""File descriptor → (own address, address of the other end)."""


def connections() -> Connections:
    """Returns this process's TCP connections; {} on systems that do not show them (Linux does)."""
    ends_by_fd: Connections = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:") and (ends := _ends(int(name))):
                    ends_by_fd[int(name)] = ends
    return ends_by_fd


def new_connections(before: Connections) -> Connections:
    """Returns the connections that are not in `before`."""
    return {fd: ends for fd, ends in connections().items() if before.get(fd) != ends}


def shut(some: Connections) -> None:
    """Shuts these connections, unless the file descriptor belongs to another connection by now.

    gloo has no abort that frees a waiting rank; a shut connection does (torch 2.15). gloo's listening sockets must stay: without them
    gloo ends the process.
    """
    for fd, ends in some.items():
        with contextlib.suppress(OSError):
            if _ends(fd) == ends:
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


_KEPT: Connections = {}


def keep_from_children(some: Connections) -> None:
    """Makes forked processes close these connections. A loader's process that is busy outlives a killed rank, and the other ranks would
    wait as long."""
    _KEPT.update(some)


def _close_in_child() -> None:
    for fd, ends in _KEPT.items():
        with contextlib.suppress(OSError):
            if _ends(fd) == ends:
                os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)
if sys.version_info < (3, 12):
    # A thread of gloo's that enters Python holds the lock of the list of threads for a moment, without Python's own. A process that is
    # forked in that moment waits for the lock for ever (CPython gh-112275): once in some hundred loader processes on busy cores. To go
    # through the list waits until the lock is free.
    os.register_at_fork(before=sys._current_frames)


def _ends(fd: int) -> tuple[Address, Address] | None:
    """Returns the two ends of a TCP connection. Raises `OSError` for a socket that is not connected."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
            return None
        return copy.getsockname()[:2], copy.getpeername()[:2]


_TASKS = Path("/proc/self/task")


def let_gloo_finish() -> None:
    """Waits until gloo's threads have released the tensors that they have sent. A script's group may be open still, or a DDP may hold it.

    It runs before the interpreter begins to exit, also if a script opens its group without `joined`. `time.sleep` releases the lock of the
    interpreter meanwhile.

    If a thread drops a tensor while the interpreter exits, Python ends the thread inside C++. This aborts the process ("terminate called
    without an active exception", exit code 134). Only Linux shows the states of threads; elsewhere there is no wait.
    """
    deadline = time.monotonic() + FORK_SECONDS
    before = _looked()
    while before and time.monotonic() < deadline:
        time.sleep(FORK_LOOK_SECONDS)
        now = _looked()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


atexit.register(let_gloo_finish)


def _looked() -> dict[str, tuple[str, str]]:
    """Returns thread → (state, number of sleeps) for each thread that runs gloo's collectives."""
    threads = {}
    with contextlib.suppress(OSError):
        for about in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if (about / "comm").read_text() == "pt_gloo_runloop\n":
                    fields = dict(line.partition(":\t")[::2] for line in (about / "status").read_text().splitlines())
                    threads[about.name] = fields["State"][:1], fields["voluntary_ctxt_switches"]
    return threads


_TORCH = Path(torch.__file__).parent
_WAITING_CODE = tuple(str(_TORCH / folder) + os.sep for folder in ("distributed", "nn/parallel", "autograd"))
"""Folders of torch's Python code that calls collectives. DDP's reducer waits inside a backward pass, below autograd."""
_OPS = str(_TORCH / "_ops.py")
"""The file of torch between a functional collective and C++."""
_OF_NCCL = re.compile(r"NCCL (communicator was aborted|operation timed out|Async Error)")
"""torch's message if the communicator was aborted before the collective (2.15), also in a plain `RuntimeError`."""
_OF_GLOO = re.compile(r"\bgloo/\S+\] |^Application timeout caused pair closure")
"""The beginning of gloo's messages if another rank did not come, or is gone, also in a process group of the script. The second one has no
file: it is that of a collective behind one that has timed out."""


def is_collective(error: BaseException) -> bool:
    """Returns whether an error comes from a collective or the store, and not from this rank's own work: by its type and its place.

    torch has a type for its own errors and NCCL's. gloo raises a plain `RuntimeError`: in a call of torch.distributed, in a `wait()`, or
    in a backward pass. Other errors occur there, too, but only gloo's have these texts (`_OF_GLOO`).
    """
    if type(error) is not RuntimeError:
        return isinstance(error, dist.DistError)
    if _OF_NCCL.match(str(error)):
        return True
    return _raised_in_waiting(error) and bool(_OF_GLOO.search(str(error)))


def _raised_in_waiting(error: BaseException) -> bool:
    """Returns whether the innermost frame of Python is in torch's code for collectives, or in a function that calls `wait()`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    code = next((frame.f_code for frame in reversed(frames) if frame.f_code.co_filename != _OPS), None)
    return code is not None and (code.co_filename.startswith(_WAITING_CODE) or "wait" in code.co_names)


def is_of_torch_distributed(error: BaseException) -> bool:
    """Returns whether a function of torch.distributed has raised the error, for example for a process group that is gone."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__", "").startswith("torch.distributed")
