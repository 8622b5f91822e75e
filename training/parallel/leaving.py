"""The end of a process whose gloo threads live on: a script that left its group open, or holds a DDP that holds it."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LOOK_SECONDS = 0.012
"""More than twice the 5 ms after which a thread that waits for Python's lock wakes and asks again."""
_BOUND_SECONDS = 5.0


def let_gloo_finish() -> None:
    """Returns when gloo's threads have let go of what they have sent. Call it before Python begins to end, without its lock
    held: `time.sleep` gives it away.

    A thread that comes to drop a tensor while Python ends is ended there, in the middle of C++, and that aborts the process
    ("terminate called without an active exception", exit code 134). Only Linux shows what its threads do; elsewhere nothing
    is waited for.
    """
    deadline = time.monotonic() + _BOUND_SECONDS
    before = _looked()
    while before and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        now = _looked()
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now


atexit.register(let_gloo_finish)


def _looked() -> dict[str, tuple[str, str]]:
    """Of each thread that runs gloo's collectives: its state, and how often it has gone to sleep so far."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(_TASKS):
            with contextlib.suppress(OSError):  # it has just ended
                if (_TASKS / task / "comm").read_text() == "pt_gloo_runloop\n":
                    said = dict(
                        line.split(":\t", 1)
                        for line in (_TASKS / task / "status").read_text().splitlines()
                        if "\t" in line
                    )
                    found[task] = said["State"][:1], said["voluntary_ctxt_switches"]
    return found
