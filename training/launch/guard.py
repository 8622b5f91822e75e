"""Ends the ranks of a launcher that was killed. The launcher starts it as a program, and hands it the ranks' process groups:

    python -I -S guard.py SECONDS        # on standard input a line at each start of the ranks; the last one counts. 0: KILL, at once

Their death by itself reaches few of them: the kernel tells a rank that asked for it (`wire/signals.py`), with a TERM. One that hangs
in a collective never gets to its end for that, one that is stopped does not hear it, and a program of one's own did not ask.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def _sent(group: int, number: int) -> bool:
    """Whether the group could be sent the signal: it has a process still."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def main(seconds: float) -> None:
    """Returns when the input has ended, and with it the launcher, and no group of the last line is left.

    Args:
        seconds: between TERM and KILL.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a cluster sends them to all processes of a job
    groups: list[int] = []
    for line in sys.stdin:
        groups = [int(word) for word in line.split()]
    deadline = time.monotonic() + seconds
    groups = [group for group in groups if not seconds or _sent(group, signal.SIGTERM)]
    while groups and time.monotonic() < deadline:
        time.sleep(0.1)
        groups = [group for group in groups if _sent(group, 0)]
    for group in groups:
        _sent(group, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
