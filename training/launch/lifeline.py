"""The life of a launcher and its ranks hangs together. Imports nothing heavy: it runs before torch is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping

from training.contract import ENV_LAUNCHER

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What the launcher hands on to its ranks."""


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Blocks the signals until the launcher has handlers and unblocks them. A PID 1 without handlers would not get them at all."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Asks the kernel for a TERM when the launcher dies (Linux; elsewhere nothing). Dies now where it is dead already."""
    launcher = env.get(ENV_LAUNCHER, "")
    if not launcher.isdigit():
        return
    parent = os.getppid()
    if parent == int(launcher):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
        parent = os.getppid()
    # It died before we asked, and init has taken us, or a supervisor in its place. A parent of 0 is in another PID
    # namespace, where the launcher's number means nothing.
    gone = os.path.exists("/proc/self") and not os.path.exists(f"/proc/{launcher}")
    if parent not in (0, int(launcher)) and (parent == 1 or gone):
        os.kill(os.getpid(), signal.SIGTERM)
