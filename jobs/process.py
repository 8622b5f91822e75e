"""A program in the foreground of a command of ours: its streams, its terminal, its signals, its exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from lockstep.training.contract import UserError


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that the kernel sends to all processes in a terminal's foreground. If they were forwarded, the program would get them twice."""
CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Streams:
    """File descriptors that a command gets."""

    stdin: int = 0
    stdout: int = 1
    stderr: int = 2

    @property
    def terminal(self) -> bool:
        """Whether input and output are a terminal. Then the command gets a terminal; otherwise its output and its errors stay separate."""
        return os.isatty(self.stdin) and os.isatty(self.stdout)


def exec_command(python: str, rank: int, command: list[str], run_dir: str) -> list[str]:
    """Returns the command that runs another command on a rank's node."""
    return [python, "-m", "lockstep.wire.exec", "--rank", str(rank), "--run-dir", run_dir, "--", *command]


def run(command: Sequence[str], streams: Streams, env: Mapping[str, str] | None = None) -> int:
    """Runs a program to its end. Returns its exit code as a shell does: 128 + N if signal N ended the program.

    The program gets this process's signals. It reads a terminal in the session of this process, where the kernel sends it Ctrl-C.

    Raises:
        UserError: there is no such program.
    """
    typed, early = os.isatty(streams.stdin), list[int]()
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the handler's signature
        if child is None:
            early.append(number)
        elif not typed or number not in OF_THE_TERMINAL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number) if typed else os.killpg(child.pid, number)

    # The program inherits what is ignored, as below nohup; a handler would undo that.
    ours = FORWARDED if threading.current_thread() is threading.main_thread() else ()
    heard = [number for number in ours if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        child = subprocess.Popen(
            command, env=env, stdin=streams.stdin, stdout=streams.stdout, stderr=streams.stderr,
            start_new_session=not typed,
        )  # fmt: skip
        for number in early:
            child.send_signal(number)
        code = child.wait()
        return 128 - code if code < 0 else code
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if child is not None and child.poll() is None:
            child.kill()
