"""The memory of this process: its size, and an allocator that keeps freed memory.

The next step then does not have to ask the kernel for it again. glibc gives every large block back at once. A training
step on a CPU frees and takes the same gigabytes of activations each time, and a fifth of its time goes into pages that
the kernel hands out and clears anew.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""`mallopt` parameters, from glibc's malloc.h."""


def keep_freed() -> bool:
    """Tells glibc's allocator not to return memory to the kernel. False where the C library is another one.

    The process then keeps the most memory that it had in use at any one time, plus what fragments in between.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018 - musl has a mallopt too, which does nothing
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def resident_bytes() -> int | None:
    """Bytes of this process that are in RAM now; None on other systems than Linux."""
    return _statm(1)


def mapped_bytes() -> int | None:
    """Bytes of resident memory that are mapped files or shared with other processes; None as `resident_bytes`."""
    return _statm(2)


def _statm(column: int) -> int | None:
    """Bytes of a column of /proc/self/statm (proc(5)), which counts pages."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
