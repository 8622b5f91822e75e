"""The life of a launcher and its ranks hangs together. Imports nothing heavy: it runs before torch is loaded."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from lockstep.training.contract import ENV_LAUNCHER

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What the launcher hands on to its ranks."""


def command_of(words: list[str]) -> list[str]:
    """The command and its arguments, without `--debug` and what torch.distributed.launch puts before them."""
    while words and (words[0] == "--debug" or words[0].startswith(("--local-rank=", "--local_rank="))):
        words = words[1:]
    return words


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Blocks the signals in the block. A program that takes this process's place in it gets what has come."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Asks the kernel for a TERM when the launcher dies (Linux; elsewhere nothing). Dies now where it is dead already.

    The launcher is ours, or torchrun, whose number nobody hands on: it is the parent of a rank that is not itself one.
    """
    launcher, parent = env.get(ENV_LAUNCHER, ""), os.getppid()
    if launcher.isdigit():
        expected = int(launcher)
    elif _TORCHRUN.issubset(env) and _may_be_torchrun(parent, env):
        expected = parent if not _adopts(parent) else -1
    else:
        return
    if parent == expected:
        with contextlib.suppress(OSError, AttributeError, ImportError):
            import ctypes  # only for the ranks: it takes its time

            ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
        parent = os.getppid()
    # It died before we asked, and init has taken us, or a supervisor in its place. A parent of 0 is in another PID
    # namespace, where the launcher's number means nothing.
    gone = os.path.exists("/proc/self") and not os.path.exists(f"/proc/{expected}")
    if parent not in (0, expected) and (parent == 1 or gone):
        os.kill(os.getpid(), signal.SIGTERM)


_TORCHRUN = {"TORCHELASTIC_RUN_ID", "RANK"}
"""Variables that torchrun gives its ranks, and has not itself."""


def _may_be_torchrun(parent: int, env: Mapping[str, str]) -> bool:
    """Whether the parent has not torchrun's variables itself: a rank has, and so has a shell between the two.

    One that has died since its number was asked for may be: whatever it was, nobody waits for this process any more.
    """
    marks = {os.fsencode(f"{name}={env[name]}") for name in _TORCHRUN}
    try:
        return not marks.issubset(Path(f"/proc/{parent}/environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError):
        return os.path.exists("/proc/self")
    except OSError:
        return _adopts(parent)


def _adopts(parent: int) -> bool:
    """Whether this is init, which takes the ranks of a launcher that has died, and not a launcher that is PID 1 itself."""
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False
    name = os.path.basename(words.split(b"\0")[0])
    return name == b"systemd" or (parent == 1 and b"python" not in words and b"torch" not in words)
