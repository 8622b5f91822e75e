"""Names the rank that is stuck while the others wait for it: what it does, and at which line.

In data parallel training one stuck rank stops all ranks. So each rank watches its progress in a thread. After a long time without
progress, compared with this run's steps, the thread looks at the stack of the main thread. A rank in a collective waits for others. A
rank that is elsewhere is the cause. The threads of a process that is stopped, or whose C code holds the interpreter's lock, do not run:
the other ranks name such a rank, without its line.

Each rank appends its finding to a file in the run directory, a line each. `read_hangs` combines them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from lockstep.training import contract, files
from lockstep.training.contract import ENV_NOTE, named, to_stderr
from lockstep.training.limits import DISK_SECONDS, FIRST_STEP_SECONDS, HANG_LOOK_SECONDS, HANG_SECONDS, SETTLE_SECONDS
from lockstep.wire.processes import children, state_of

QUIET_FACTOR = 4.0
"""Factor of the longest time without progress so far, after which a rank is named at the earliest."""
MAX_BYTES = 64 << 20
"""Most bytes to read of the file."""
LOADER, DISK = "waits for its data loader", "waits for a disk or a device"
STANDS = (LOADER, DISK)
"""States that are a hang even if no rank waits for another."""
_OURS = os.fspath(Path(contract.__file__).parent) + os.sep


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class StalledRank:
    """A rank that makes no progress."""

    rank: int
    what: str
    where: str
    """The innermost line and function of the user's code; "": the rank does not report."""
    waits: bool
    """Whether it waits for other ranks."""
    stacks: str = ""
    """The stacks of its threads. Of the waiting ranks only one has them."""

    @property
    def activity(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


@dataclass(frozen=True)
class Hang:
    """The findings of all ranks."""

    said: str
    step: int
    ranks: list[StalledRank]
    """The ranks that the others wait for come first."""

    @property
    def causes(self) -> list[StalledRank]:
        return [one for one in self.ranks if not one.waits]

    @property
    def named(self) -> list[StalledRank]:
        """The ranks that the others wait for. If none is known, all that wait: they are in different collectives."""
        return self.causes or self.ranks


def read_hangs(data: bytes) -> Hang | None:
    """Combines the lines of the file; None: no line can be read."""
    stalled: dict[int, StalledRank] = {}
    step, began, seconds = 0, 0.0, 0.0
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            value = files.parsed(line)
            ranks = [_stalled_rank_of(one) for one in value["ranks"]]
            step, quiet = int(value["step"]), float(value["seconds"])
            if quiet > seconds:
                began, seconds = float(value["time"]) - quiet, quiet
            stalled.update((one.rank, one) for one in ranks)
    return _hang(stalled.values(), began, seconds, step) if stalled else None


def _hang(stalled: Iterable[StalledRank], began: float, seconds: float, step: int) -> Hang:
    ranks = sorted(stalled, key=lambda one: (one.waits, one.rank))
    since = time.strftime("%H:%M:%S", time.localtime(began))
    return Hang(f"no step for {seconds:.0f} s, since {since}, after step {step}: {_sentence(ranks)}", step, ranks)


def _stalled_rank_of(value: dict[str, Any]) -> StalledRank:
    """Returns the rank of an entry. Raises `ValueError`, `TypeError`, `KeyError`."""
    texts = {name: value[name] for name in ("what", "where", "stacks") if isinstance(value[name], str)}
    return StalledRank(rank=int(value["rank"]), waits=bool(value["waits"]), **texts)


def of_run(run_dir: Path) -> Hang | None:
    """Returns the hang that the run directory reports; None: there is none."""
    try:
        return read_hangs(files.read(run_dir / contract.HANG_FILE, MAX_BYTES))
    except (OSError, ValueError):
        return None


def _sentence(ranks: list[StalledRank]) -> str:
    causes, waiting = [one for one in ranks if not one.waits], [one.rank for one in ranks if one.waits]
    if causes:
        said = "; ".join(f"rank {one.rank} {one.activity}" for one in causes)
        others = f"rank {named(waiting)} waits" if len(waiting) == 1 else f"ranks {named(waiting)} wait"
        return f"{said}, and {others}" if waiting else said
    places: dict[str, list[int]] = {}
    for one in ranks:
        places.setdefault(one.where, []).append(one.rank)
    said = "; ".join(f"rank {named(there)} ({where})" for where, there in places.items())
    return f"all ranks wait for others: {said}"


class Hangs:
    """Watches the progress of this rank in a thread.

    A script may have several Sessions that take turns. Progress of one counts for all, and the newest open Session reports.

    Args:
        rank: the rank for its launcher.
        run_dir: absolute path of the run directory.
        ranks: returns the ranks that train now.
        ends: whether a rank that hangs is killed, so that it is a lost rank like any other.
        environment: the variables of this process. A single rank without our launcher is not watched: no rank waits for it.
    """

    _open: ClassVar[list[Hangs]] = []
    """The watches of this process, oldest first."""
    _done: ClassVar[int] = 0
    """Steps, batches of evaluations and polls of this process."""

    def __init__(
        self, rank: int, run_dir: str, attempt: int, ranks: Callable[[], Collection[int]], ends: bool, environment: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._rank, self._run_dir, self._attempt, self._ranks, self._ends = rank, run_dir, attempt, ranks, ends
        self._file = Path(run_dir, contract.HANG_FILE)
        self._steps = self._of_attempt = self._seen = 0
        self._since = self._looked = time.monotonic()
        self._longest = 0.0
        """The longest time without progress since the first step, in seconds."""
        self._again = 0.0
        """The time of the next look at the stack, after one that has shown no hang."""
        self._finding: StalledRank | None = None
        """This rank's part of a hang, until the rank makes progress."""
        self._reported, self._settles = 0, 0.0
        """The number of ranks in the file, and the time at which it counts as complete, unless another rank reports."""
        self._said = self._named = False
        """Whether the hang was reported, and whether this rank was named."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hangs", daemon=True)
        if len(ranks()) > 1 or ENV_NOTE in environment:
            self._remove_file()  # of an earlier attempt
            Hangs._open.append(self)
            self._thread.start()

    def alive(self, steps: int, of_attempt: int) -> None:
        """Counts progress: a step, a batch of an evaluation, or a poll for signals.

        Args:
            steps: steps of the run so far.
            of_attempt: steps of this attempt so far.
        """
        self._steps, self._of_attempt = steps, of_attempt
        Hangs._done += 1

    def close(self) -> None:
        """Ends the watch. Does not wait for a disk that hangs."""
        self._over.set()
        if self in Hangs._open:
            Hangs._open.remove(self)
            self._thread.join(DISK_SECONDS)

    def _watch(self) -> None:
        while not self._over.wait(HANG_LOOK_SECONDS):
            self._look(time.monotonic())
        self._progress()

    def _look(self, now: float) -> None:
        late, self._looked = now - self._looked > 10 * HANG_LOOK_SECONDS, now
        quiet = now - self._since
        if self._seen != Hangs._done:
            self._longest = max(self._longest, quiet if self._of_attempt > 1 else 0.0)
            self._seen, self._since = Hangs._done, now
            self._progress()
        elif late or Hangs._open[-1:] != [self]:  # this process was stopped, and the others may have been, too
            self._since = now
        elif self._finding is not None:
            if not self._said:
                self._settle(self._finding, quiet)
        elif quiet > self._bound() or (quiet > HANG_LOOK_SECONDS and self._file.exists()):
            self._find(quiet)

    def _bound(self) -> float:
        return max(HANG_SECONDS if self._of_attempt else FIRST_STEP_SECONDS, QUIET_FACTOR * self._longest)

    def _find(self, seconds: float) -> None:
        others = of_run(Path(self._run_dir))
        somebody_waits = others is not None and any(one.waits for one in others.ranks)
        if time.monotonic() < self._again and not somebody_waits:
            return
        finding = _stalled_rank(self._rank)
        if not finding.waits and not somebody_waits and finding.what not in STANDS:
            self._again = time.monotonic() + HANG_SECONDS
            return  # no rank waits for this one: an evaluation, a long step, work between two steps
        self._finding = finding if finding.waits and somebody_waits else replace(finding, stacks=_stacks())
        self._append(self._finding, seconds)

    def _append(self, stalled: StalledRank, seconds: float) -> None:
        line = {
            "time": time.time(), "step": self._steps, "seconds": round(seconds, 1), "size": len(self._ranks()),
            "ranks": [asdict(stalled)],
        }  # fmt: skip
        with contextlib.suppress(OSError):
            files.append(self._file, line)

    def _settle(self, finding: StalledRank, seconds: float) -> None:
        """Reports the hang once all ranks have reported, or no further one has for some time. The first rank that the others wait for
        reports it, or the first rank that waits."""
        now, since = time.monotonic(), time.time() - seconds
        hang = of_run(Path(self._run_dir)) or _hang([finding], since, seconds, self._steps)
        silent = sorted(set(self._ranks()) - {one.rank for one in hang.ranks})
        if len(hang.ranks) != self._reported:
            self._reported, self._settles = len(hang.ranks), now + SETTLE_SECONDS
        if silent and now < self._settles:
            return
        self._said, speaks = True, hang.named[0].rank == self._rank
        ends = speaks or finding in hang.causes
        if speaks:
            for rank in [] if hang.causes else silent:
                self._append(StalledRank(rank, "does not answer", "", waits=False), seconds)
            hang = of_run(Path(self._run_dir)) or hang
            self._say(hang, seconds)
        self._named = any(one.rank == self._rank for one in hang.named)
        if self._ends and ends:
            if not speaks:
                time.sleep(HANG_LOOK_SECONDS)  # the rank that reports the hang is killed last
            for pid in (*children(os.getpid()), os.getpid()):  # a loader that hangs does not notice the end of its rank
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _say(self, hang: Hang, seconds: float) -> None:
        """Reports on standard error and in the run's events."""
        to_stderr(f"hang: {hang.said} (stacks: {self._file})")
        event = {
            "event": "hang", "time": round(time.time(), 3), "attempt": self._attempt, "step": hang.step,
            "reason": hang.said, "seconds": round(seconds, 1), "ranks": [one.rank for one in hang.named],
        }  # fmt: skip
        with contextlib.suppress(OSError):
            files.append(Path(self._run_dir, contract.EVENTS_FILE), event)

    def _progress(self) -> None:
        """Ends the hang: this rank has made progress."""
        self._again = 0.0
        if self._finding is not None:
            self._remove_file()
            if self._named and not self._over.is_set():
                to_stderr(f"hang: rank {self._rank} gets further again")
        self._finding, self._said, self._named, self._reported = None, False, False, 0

    def _remove_file(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


def _stalled_rank(rank: int) -> StalledRank:
    """Returns what the main thread of this process does."""
    main = threading.main_thread()
    state = state_of(f"self/task/{main.native_id}")
    stack = sys._current_frames().get(main.ident or 0)
    frames = (
        [Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_stack(stack)]
        if stack
        else []
    )
    waits = state != "D" and _waits(frames, state)
    what = DISK if state == "D" else "waits for others" if waits else _what(frames, state)
    return StalledRank(rank, what, _where(frames), waits)


def _stacks() -> str:
    """Returns the stacks of this process's threads, as `faulthandler` writes them, the main thread's first."""
    main = f"0x{threading.main_thread().ident or 0:016x}"
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "\n\n".join(
            sorted(file.read().strip().split("\n\n"), key=lambda one: main not in one.partition("\n")[0])
        )


def _waits(frames: list[Frame], state: str) -> bool:
    """Returns whether these frames are of a thread that waits for other ranks: in a collective, for a GPU or in a backward pass."""
    for frame in frames[:6]:
        path = frame.file
        if os.path.join("torch", "distributed", "") in path or path.startswith((_OURS + "parallel", _OURS + "sync")):
            return True
        if state == "S" and (
            os.path.join("torch", "autograd", "") in path or os.path.join("torch", "cuda", "") in path
        ):
            return True
    return False


def _what(frames: list[Frame], state: str) -> str:
    paths = [frame.file.replace(os.sep, "/") for frame in frames[:8]]
    if any("/torch/utils/data/" in path for path in paths):  # it waits with frames of multiprocessing
        return LOADER
    for path in paths:
        if path.endswith(("/threading.py", "/queue.py")):
            return "waits for a lock"
        if path.endswith(
            ("/subprocess.py", "/socket.py", "/ssl.py", "/selectors.py", "/multiprocessing/connection.py")
        ):
            return "waits for another process or a network"
    return "computes" if state == "R" else "waits"


def _where(frames: list[Frame]) -> str:
    """Returns the innermost line of the user's code, else the innermost line."""
    libraries = os.path.dirname(os.__file__) + os.sep  # and within it those that were installed
    own = next(
        (
            one
            for one in frames
            if not one.file.startswith((libraries, _OURS, "<frozen")) and "-packages" + os.sep not in one.file
        ),
        None,
    )
    place = own or (frames[0] if frames else None)
    return str(place) if place is not None else ""
