"""Executes the program of a rank in this process, which the kernel kills when its launcher dies (Linux).

    python -I -S exec_rank.py LAUNCHER PROGRAM ARGUMENT…

The kernel needs no handler for this, so a rank that hangs or is stopped ends, too. Processes that the program starts do not inherit it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
_NO_PROGRAM = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC)


def wrapped(command: list[str]) -> list[str]:
    """Returns the arguments that start this command as a rank of this process, from its main thread."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(launcher: int, command: list[str]) -> None:
    """Executes the command. Returns only if the launcher is dead already. Exits with 2 for an unknown program, with 1 if it cannot start.

    Args:
        launcher: id of the process that has started this process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError, ImportError):  # a Python without ctypes
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        return  # it died before the kernel knew
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - as it was given
    except OSError as error:
        print(f"launch: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(2 if error.errno in _NO_PROGRAM else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
