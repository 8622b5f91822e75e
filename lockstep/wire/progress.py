"""The progress of a rank, for its watcher, and the stacks of its threads on demand.

The rank counts its progress in a small mapped file. At a signal it writes the stacks of its threads into a second file. `faulthandler`
does so in C, even while a library holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.training.contract import ENV_NOTE, OF_A_JOB
from lockstep.training.limits import EXEC_SECONDS, STACK_LOOK_SECONDS, STACK_SECONDS, WATCHER_SECONDS

SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else 0
"""The real-time signal that asks for stacks; nothing else uses its number. 0: this system has none."""
WATCHER = "lockstep.wire.hangs"
"""The program that watches a rank if our launcher has not started it."""
_COUNTS = struct.Struct("<QQQQQ")
"""The counts of `RankProgress`, in its order."""
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")


@dataclass(frozen=True)
class RunInfo:
    """The run of a rank."""

    run_dir: str
    size: int
    """Number of ranks; 0: the number changes (`launch --live`)."""
    attempt: int
    ends: bool
    """Whether the watcher kills a rank that hangs, so that it is a lost rank like any other."""
    grace: float
    """Seconds that the run asks for between a signal and its end."""


class Progress:
    """The progress of this rank, for the launcher. If our launcher has not started the rank, the constructor starts a watcher process.

    A script may have several Sessions that take turns. The file shows the newest open Session, and counts the progress of all.

    Args:
        number: number of the rank for its launcher.
    """

    def __init__(self, number: int, about: RunInfo, environment: Mapping[str, str]) -> None:
        self._counts: mmap.mmap | None = None
        self._done = self._steps = self._of_attempt = 0
        self._watcher: subprocess.Popen[bytes] | None = None
        note = environment.get(ENV_NOTE)
        if not SIGNAL or (about.size == 1 and not note):  # no rank waits for it
            return
        with contextlib.suppress(OSError):
            self._folder = Path(note).parent if note else Path(tempfile.mkdtemp(prefix="lockstep-"))
            self._number, self._about = number, about
            if _OPEN:
                _OPEN[-1]._hide()
            _OPEN.append(self)
            self._show()
            if not note:
                self._watcher = _watcher(self._folder, number, environment)

    def _show(self) -> None:
        """Opens the files of the rank's progress, and shows this Session. Raises `OSError`."""
        path = self._folder / f"progress-{self._number}"
        self._stacks = _stacks_file(self._folder, self._number).open("ab")  # a loader's process may hold it open
        faulthandler.register(SIGNAL, self._stacks, all_threads=True)
        thread = threading.main_thread().ident or 0
        counts = _COUNTS.pack(os.getpid(), thread, self._done, self._steps, self._of_attempt)
        path.with_suffix(".new").write_bytes(counts + json.dumps(asdict(self._about)).encode())
        path.with_suffix(".new").rename(path)
        with path.open("r+b") as file:
            self._counts = mmap.mmap(file.fileno(), _COUNTS.size)

    def _hide(self) -> None:
        if self._counts is not None:
            struct.pack_into("<Q", self._counts, 0, 0)  # no process: no watcher asks it for stacks any more
            self._counts.close()
            self._counts = None
            faulthandler.unregister(SIGNAL)
            self._stacks.close()

    def alive(self, steps: int, of_attempt: int) -> None:
        """Counts progress: a step, a batch of an evaluation, or a poll for signals.

        Args:
            steps: steps of the run so far.
            of_attempt: steps of this attempt so far.
        """
        self._steps, self._of_attempt = steps, of_attempt
        if self in _OPEN:
            _OPEN[-1]._count()

    def _count(self) -> None:
        if self._counts is not None:
            self._done += 1
            struct.pack_into("<QQQ", self._counts, 16, self._done, self._steps, self._of_attempt)

    def close(self) -> None:
        self._hide()
        if self in _OPEN:
            _OPEN.remove(self)
        if _OPEN and _OPEN[-1]._counts is None:
            with contextlib.suppress(OSError):
                _OPEN[-1]._show()
        if self._watcher is not None:
            self._watcher.send_signal(SIGNAL)
            try:
                self._watcher.wait(WATCHER_SECONDS)
            except subprocess.TimeoutExpired:  # its disk does not answer
                self._watcher.kill()
            self._watcher = None
            shutil.rmtree(self._folder, ignore_errors=True)


_OPEN: list[Progress] = []
"""The progress of this process's open Sessions, oldest first."""


def _watcher(folder: Path, number: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the watcher, which ends with this process and is not itself a rank."""
    here = os.fspath(Path(__file__).parents[2])
    env = {name: value for name, value in environment.items() if name not in OF_A_JOB}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", WATCHER, os.fspath(folder), str(number), str(os.getpid())]
    return subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True)


@dataclass(frozen=True)
class RankProgress:
    """The progress of a rank."""

    pid: int
    thread: int
    """Identity of its main thread."""
    done: int
    """Count of the rank's steps, batches of evaluations and polls."""
    steps: int
    """Steps of the run."""
    of_attempt: int
    """Steps of this attempt."""
    about: RunInfo


def seen(folder: Path, rank: int, also_ending: bool = False) -> RankProgress | None:
    """Reads the progress of a rank; None: the rank has written none, or (unless `also_ending`) it ends.

    Args:
        also_ending: its last checkpoint may still be on its way to a bucket.
    """
    try:
        data = (folder / f"progress-{rank}").read_bytes()
        pid, thread, done, steps, of_attempt = _COUNTS.unpack_from(data)
        about = RunInfo(**json.loads(data[_COUNTS.size :]))
    except (OSError, struct.error, ValueError, TypeError):
        return None
    return RankProgress(pid, thread, done, steps, of_attempt, about) if pid or also_ending else None


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


def stat_of(pid: int | str) -> list[str]:
    """Returns the fields of proc_pid_stat(5) behind the name of the program. 0 is the state, 1 the parent, 3 the session, 19 the start
    in clock ticks. Returns [] if there is no such process. "self" names this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def variables_of(pid: int) -> dict[str, str]:
    """Returns the environment of a process of this user (Linux); {}: it has ended, or belongs to another user.

    Any process may name any job, rank and launcher in its environment, and code to load, so callers must not trust the values.
    """
    try:
        # The descriptor belongs to this very process, also after its id is given to another one.
        folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return {}
    try:
        status, variables = (Path(f"/proc/self/fd/{folder}/{name}") for name in ("status", "environ"))
        users = next((line.split()[1:] for line in status.read_bytes().split(b"\n") if line.startswith(b"Uid:")), [])
        deadline = time.monotonic() + EXEC_SECONDS
        # Within execve(2) a process has a new memory and no environment in it yet.
        while not (environ := variables.read_bytes()) and _has_variables(folder) and time.monotonic() < deadline:
            time.sleep(0.001)
    except OSError:
        return {}
    finally:
        os.close(folder)
    if set(users) != {str(os.geteuid()).encode()}:  # real, effective, saved, of the file system
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in environ.split(b"\0") if b"=" in entry)


def _has_variables(folder: int) -> bool:
    """Returns whether the process of this folder of /proc has an environment, or will have one when its program begins."""
    fields = stat_of(f"self/fd/{folder}")
    return len(fields) > 48 and fields[20] != "0" and not fields[47] == fields[48] != "0"  # vsize, env_start, env_end


def state_of(pid: int) -> str:
    """Returns R: the process runs. S: it waits. D: it waits for a disk or a device. T: it is stopped (proc_pid_stat(5)). "": it is gone."""
    return next(iter(stat_of(pid)), "")


def stacks(folder: Path, ranks: Mapping[int, RankProgress], of_loaders: bool = False) -> dict[int, str]:
    """Returns the stacks of each rank's threads now, as `faulthandler` writes them. Takes a second at most.

    "": the rank does not answer, since it is stopped or waits for a disk.

    Args:
        of_loaders: the stacks of the processes that the rank has forked, in place of the rank's.
    """
    begins = {
        rank: _ask(folder, rank, children(progress.pid) if of_loaders else [progress.pid])
        for rank, progress in ranks.items()
    }
    texts = dict.fromkeys(ranks, "")
    deadline = time.monotonic() + STACK_SECONDS
    waits = {rank: begin for rank, begin in begins.items() if begin is not None}
    while waits and time.monotonic() < deadline:
        time.sleep(STACK_LOOK_SECONDS)
        for rank, begin in list(waits.items()):
            with contextlib.suppress(OSError), _stacks_file(folder, rank).open("rb") as file:
                file.seek(begin)
                text = file.read().decode(errors="replace")
                if text and text == texts[rank]:  # nothing was added since the last look
                    del waits[rank]
                texts[rank] = text
    return {rank: _main_first(text, ranks[rank].thread) for rank, text in texts.items()}


def _main_first(text: str, thread: int) -> str:
    """Puts the stack of this thread, which `faulthandler` writes last, before the others."""
    return "\n\n".join(sorted(text.strip().split("\n\n"), key=lambda one: not _is_of(one, thread)))


def _is_of(text: str, thread: int) -> bool:
    """Returns whether the text begins with the headline of this thread's stack."""
    return (head := _THREAD.match(text)) is not None and int(head[1], 16) == thread


def _ask(folder: Path, rank: int, pids: list[int]) -> int | None:
    """Asks for the stacks. Returns where in the rank's file the answer will begin; None: no process will answer."""
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
    """Returns the processes that this process has started, such as those of its data loader."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return pids


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"progress-{rank}.stacks"


def main_frames(text: str, thread: int) -> list[Frame]:
    """Returns the frames of this thread, the innermost first."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if _THREAD.match(line) is not None:
            inside = _is_of(line, thread)
        elif inside and (match := _FRAME.match(line)) is not None:
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return frames
