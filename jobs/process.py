"""A program in the foreground of a command of ours: its streams, its terminal, its signals, its exit code."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from lockstep.training.contract import UserError

from .status import warn

FORWARDED = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
"""Signals that the kernel sends to all processes in a terminal's foreground. If they were forwarded, the program would get them twice."""
LOOK_SECONDS = 0.05
CHUNK = 1 << 16

Interrupt = Callable[[int], None]


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


def exec_command(python: str, rank: int, command: list[str], run_dir: str, *more: str) -> list[str]:
    """Returns the command that runs another command on a rank's node. `more`: further flags of `lockstep.wire.exec`."""
    words = [python, "-m", "lockstep.wire.exec", "--rank", str(rank), *more]
    return [*words, *(["--run-dir", run_dir] if run_dir else []), "--", *command]


def signal_command(python: str, token: str, number: int) -> list[str]:
    """Returns the command that sends a signal to the command that was started with `--token`, on the same node."""
    return [python, "-m", "lockstep.wire.exec", "--token", token, "--signal", str(number)]


@contextlib.contextmanager
def trap_signals(numbers: Sequence[signal.Signals]) -> Iterator[queue.SimpleQueue[int]]:
    """Yields a queue of the signals that arrive in the block, in place of their effect. Outside of the main thread, the queue stays
    empty."""
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the handler's signature
        arrived.put(number)

    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in numbers} if ours else {}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    command: Sequence[str], streams: Streams, env: Mapping[str, str] | None = None, interrupt: Interrupt | None = None
) -> int:
    """Runs a program to its end. Returns its exit code as a shell does: 128 + N if signal N ended the program.

    Without a terminal the program has its own session, and this process forwards its signals to the program.

    Args:
        interrupt: sends a signal to the process that the program runs elsewhere, if the program itself does not.

    Raises:
        UserError: there is no such program.
    """
    terminal = streams.terminal
    # Another session may not read from our terminal, so this process copies the typed input.
    typed = not terminal and os.isatty(streams.stdin)
    again = False
    with trap_signals(FORWARDED) as signals:
        try:
            child = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE if typed else streams.stdin, stdout=streams.stdout,
                stderr=streams.stderr, start_new_session=not terminal,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"cannot start {command[0]}: {error.strerror}") from None
        if child.stdin is not None:
            threading.Thread(target=_pump, args=(streams.stdin, child.stdin.fileno()), daemon=True).start()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(LOOK_SECONDS)
                    return 128 - code if code < 0 else code
                while not signals.empty():
                    number = signals.get()
                    if not (terminal and number in OF_THE_TERMINAL):
                        _pass_on(number, child, terminal, interrupt, again)
                        again = True
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()


def _pass_on(
    number: int, child: subprocess.Popen[bytes], terminal: bool, interrupt: Interrupt | None, again: bool
) -> None:
    if interrupt is not None and not terminal:
        try:
            interrupt(number)
            return
        except UserError as error:
            warn(str(error))
        if not again:  # if a second signal cannot be delivered, the program is ended: nothing else would end it
            return
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, number) if terminal else os.killpg(child.pid, number)


def _pump(source: int, target: int) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(source, CHUNK):
            while data:
                data = data[os.write(target, data) :]
    with contextlib.suppress(OSError):
        os.close(target)
