"""How far a rank is, where its launcher sees it, and its stacks where somebody asks for them.

The rank counts what it gets done in a small file in its launcher's folder. It says there, too, at which signal it writes the stacks of
its threads into a second file: `faulthandler` does that in C, so also where a library holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.training.contract import ENV_NOTE, stat_of

SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 9
"""Nothing else uses a real-time signal of this number."""
_COUNTS = struct.Struct("<QQQQQ")
"""As in `Seen`."""
_STACK_SECONDS = 1.0
_PAUSE_SECONDS = 0.02
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")


class Progress:
    """This rank's. Does nothing where no launcher of ours has started it.

    Args:
        number: of the rank, as its launcher knows it.
        run_dir: where what is said of a rank that hangs belongs.
    """

    def __init__(self, number: int, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._counts: mmap.mmap | None = None
        self._done = 0
        if not (note := environment.get(ENV_NOTE)) or not hasattr(faulthandler, "register"):
            return
        folder = Path(note).parent
        place = folder / f"progress-{number}"
        try:
            self._stacks = _stacks_file(folder, number).open("wb")
            faulthandler.register(SIGNAL, self._stacks, all_threads=True)
            text = json.dumps(os.fspath(run_dir)).encode()
            place.with_suffix(".new").write_bytes(
                _COUNTS.pack(os.getpid(), threading.main_thread().ident or 0, 0, 0, 0) + text
            )
            place.with_suffix(".new").rename(place)
            with place.open("r+b") as file:
                self._counts = mmap.mmap(file.fileno(), _COUNTS.size)
        except OSError:
            return

    def advance(self, steps: int, of_attempt: int) -> None:
        """Something got done: a step, a batch of an evaluation, a look for signals.

        Args:
            steps: of the run so far.
            of_attempt: of this attempt so far.
        """
        if self._counts is not None:
            self._done += 1
            struct.pack_into("<QQQ", self._counts, 16, self._done, steps, of_attempt)

    def close(self) -> None:
        if self._counts is not None:
            struct.pack_into("<Q", self._counts, 0, 0)  # no process: nobody asks it for stacks any more
            self._counts.close()
            self._counts = None
            faulthandler.unregister(SIGNAL)
            self._stacks.close()


@dataclass(frozen=True)
class Seen:
    """What a rank has said of its progress."""

    pid: int
    thread: int
    """Identity of its main thread."""
    done: int
    """What it has got done, counted."""
    steps: int
    """Of the run."""
    of_attempt: int
    """Steps of this attempt."""
    run_dir: Path


def seen(folder: Path, rank: int) -> Seen | None:
    """None: it has said nothing, or ends."""
    try:
        data = (folder / f"progress-{rank}").read_bytes()
        pid, thread, done, steps, of_attempt = _COUNTS.unpack_from(data)
        return Seen(pid, thread, done, steps, of_attempt, Path(json.loads(data[_COUNTS.size :]))) if pid else None
    except (OSError, struct.error, ValueError):
        return None


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def state_of(pid: int) -> str:
    """R: it runs; S: it waits; D: for a disk or a device; T: it stands stopped (proc_pid_stat(5)); "": there is none."""
    return next(iter(stat_of(pid)), "")


def stacks(folder: Path, ranks: Mapping[int, Seen], of_loaders: bool = False) -> dict[int, str]:
    """Those of each rank's threads now, as `faulthandler` writes them; "" where it does not answer: it stands stopped, or waits for a
    disk. Takes a second at most.

    Args:
        of_loaders: those of the processes that it has forked, in place of its own.
    """
    begins = {
        rank: _ask(folder, rank, children(found.pid) if of_loaders else [found.pid]) for rank, found in ranks.items()
    }
    texts = dict.fromkeys(ranks, "")
    deadline = time.monotonic() + _STACK_SECONDS
    waits = {rank: begin for rank, begin in begins.items() if begin is not None}
    while waits and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        for rank, begin in list(waits.items()):
            with contextlib.suppress(OSError), _stacks_file(folder, rank).open("rb") as file:
                file.seek(begin)
                text = file.read().decode(errors="replace")
                if text and text == texts[rank]:  # nothing was added since the last look
                    del waits[rank]
                texts[rank] = text
    return texts


def _ask(folder: Path, rank: int, pids: list[int]) -> int | None:
    """Where in the rank's file the answer will begin; None: there will be none."""
    try:
        begin = _stacks_file(folder, rank).stat().st_size
    except OSError:
        return None
    asked = False
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.M)
            if caught is not None and int(caught[1], 16) >> (SIGNAL - 1) & 1 and state_of(pid) in ("R", "S"):
                os.kill(pid, SIGNAL)
                asked = True
    return begin if asked else None


def children(pid: int) -> list[int]:
    """The processes that it has started, such as those of its data loader."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"progress-{rank}.stacks"


def main_frames(text: str, thread: int) -> list[Frame]:
    """Of this thread, the innermost first."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            inside = int(head[1], 16) == thread
        elif inside and (match := _FRAME.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return frames
