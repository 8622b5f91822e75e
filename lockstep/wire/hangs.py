"""Names the rank that is stuck while the others wait for it: what it does, and at which line.

In data parallel training one stuck rank stops all ranks. So when no watched rank has made progress for long, compared with this run's
steps, the watcher asks each rank for its stacks (`progress.py`). A rank whose main thread is in a collective waits for others. A rank
that is elsewhere is the cause. A launcher watches the ranks of its node. A rank that no launcher of ours has started has a watcher
process.

    python -m lockstep.wire.hangs FOLDER NUMBER PID      # the folder of its progress file, its number, its process.

Each watcher appends its findings to a file in the run directory, a line each. `read_hangs` combines them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.training import contract, files
from lockstep.training.contract import named, to_stderr
from lockstep.training.limits import DISK_SECONDS, FIRST_STEP_SECONDS, HANG_LOOK_SECONDS, HANG_SECONDS, SETTLE_SECONDS
from lockstep.wire.progress import SIGNAL, Frame, RankProgress, children, main_frames, seen, stacks, state_of
from lockstep.wire.signals import FORWARDED

QUIET_FACTOR = 4.0
"""Factor of the longest time without progress so far, after which a rank is named at the earliest."""
MAX_BYTES, MAX_RANKS = 64 << 20, 1 << 16
"""Most bytes to read of the file, and most silent ranks to name."""
LOADER, STOPPED, DISK = "waits for its data loader", "stands stopped", "waits for a disk or a device"
STANDS = (LOADER, STOPPED, DISK)
"""States that are a hang even if no rank waits for another."""
_OURS = os.fspath(Path(contract.__file__).parent) + os.sep
T = TypeVar("T")


@dataclass(frozen=True)
class StalledRank:
    """A rank that makes no progress."""

    rank: int
    what: str
    where: str
    """The innermost line and function of the user's code; "": the rank does not answer."""
    waits: bool
    """Whether it waits for other ranks."""
    stacks: str = ""
    """The stacks of its threads. Of the waiting ranks only one has them."""
    loaders: str = ""
    """The stacks of its data loader's processes, if it waits for them."""

    @property
    def activity(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


@dataclass(frozen=True)
class Hang:
    """The findings of all watchers."""

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
    step = size = 0
    seconds, since = 0.0, time.localtime(0)
    for line in data.splitlines():
        # The last two for a time that no clock has.
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, OSError):
            value = files.parsed(line)
            ranks = [_stalled_rank_of(one) for one in value["ranks"]]
            step, size, quiet = int(value["step"]), int(value["size"]), float(value["seconds"])
            if quiet > seconds:
                since, seconds = time.localtime(float(value["time"]) - quiet), quiet
            stalled.update((one.rank, one) for one in ranks)
    return _hang(stalled.values(), since, seconds, step, size) if stalled else None


def _hang(stalled: Iterable[StalledRank], since: time.struct_time, seconds: float, step: int, size: int) -> Hang:
    ranks = sorted(stalled, key=lambda one: (one.waits, one.rank))
    clock = time.strftime("%H:%M:%S", since)
    return Hang(f"no step for {seconds:.0f} s, since {clock}, after step {step}: {_sentence(ranks, size)}", step, ranks)


def _stalled_rank_of(value: dict[str, Any]) -> StalledRank:
    """Returns the rank of an entry. Raises `ValueError`, `TypeError`, `KeyError`."""
    texts = {name: value[name] for name in ("what", "where", "stacks", "loaders") if isinstance(value[name], str)}
    return StalledRank(rank=int(value["rank"]), waits=bool(value["waits"]), **texts)


def of_run(run_dir: Path) -> Hang | None:
    """Returns the hang that the run directory reports; None: there is none."""
    try:
        return read_hangs(files.read(run_dir / contract.HANG_FILE, MAX_BYTES))
    except (OSError, ValueError):
        return None


def _sentence(ranks: list[StalledRank], size: int) -> str:
    causes, waiting = [one for one in ranks if not one.waits], [one.rank for one in ranks if one.waits]
    if causes:
        said = "; ".join(f"rank {one.rank} {one.activity}" for one in causes)
        others = f"rank {named(waiting)} waits" if len(waiting) == 1 else f"ranks {named(waiting)} wait"
        return f"{said}, and {others}" if waiting else said
    places: dict[str, list[int]] = {}
    for one in ranks:
        places.setdefault(one.where, []).append(one.rank)
    said = "; ".join(f"rank {named(there)} ({where})" for where, there in places.items())
    silent = sorted(set(range(size)) - set(waiting)) if max(waiting) < size <= MAX_RANKS else []
    if silent:
        return f"{said} waits for others, and nothing is heard of rank {named(silent)}"
    return f"all ranks wait for others: {said}"


@dataclass
class _Rank:
    progress: RankProgress
    since: float
    """The time of its last progress (`time.monotonic`)."""
    longest: float = 0.0
    """The longest time without progress since its first step, in seconds."""


@dataclass
class _Finding:
    """A hang of this node's ranks, until one makes progress."""

    first: RankProgress
    """One of the ranks."""
    ranks: dict[int, StalledRank]
    pids: dict[int, int]
    named: list[int]
    """Ranks that this watcher has named."""
    said: bool = False
    """Whether the hang was reported, here or by another watcher."""
    size: int = 0
    """The size of the file at the last look."""
    settled: float = 0.0
    """The time at which the file counts as complete, unless it grows (`time.monotonic`)."""


class Hangs:
    """The watcher of some ranks of a node.

    Args:
        folder: folder of the ranks' progress files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self._next = 0.0
        self._again = 0.0
        """The time of the next question for stacks, after one that has shown no hang."""
        self._finding: _Finding | None = None
        self._disk_answers = True

    def look(self, ranks: Collection[int]) -> None:
        """Checks the ranks that run here. The caller repeats the call."""
        now = time.monotonic()
        if now < self._next:
            return
        late, self._next = now - self._next > 10 * HANG_LOOK_SECONDS, now + HANG_LOOK_SECONDS
        for rank in [rank for rank in self._ranks if rank not in ranks]:
            del self._ranks[rank]
        for rank in ranks:
            progress, known = seen(self._folder, rank), self._ranks.get(rank)
            if progress is None or not state_of(progress.pid):
                self._ranks.pop(rank, None)
            elif known is None or known.progress.pid != progress.pid:
                self._ranks[rank] = _Rank(progress, now)
            elif known.progress.done != progress.done:
                quiet = now - known.since
                self._ranks[rank] = _Rank(
                    progress, now, max(known.longest, quiet if known.progress.of_attempt else 0.0)
                )
            elif late:  # this process was stopped, and the ranks may have been, too
                known.since = now
        quiet = min((now - known.since for known in self._ranks.values()), default=0.0)
        if quiet < HANG_LOOK_SECONDS:
            self.over()
        elif self._finding is not None:
            self._settle(self._finding, quiet)
        elif len(self._ranks) == len(ranks) and quiet > self._bound():
            self._find(quiet)

    def _bound(self) -> float:
        begun = all(known.progress.of_attempt for known in self._ranks.values())
        longest = max(known.longest for known in self._ranks.values())
        return max(HANG_SECONDS if begun else FIRST_STEP_SECONDS, QUIET_FACTOR * longest)

    def _find(self, seconds: float) -> None:
        shown = {rank: known.progress for rank, known in self._ranks.items()}
        first = next(iter(shown.values()))
        others = self._told(first)
        somebody_waits = others is not None and any(one.waits for one in others.ranks)
        if time.monotonic() < self._again and not somebody_waits:
            return
        texts = stacks(self._folder, shown)
        ranks = {rank: _stalled_rank(rank, one, texts[rank]) for rank, one in shown.items()}
        waiting = [rank for rank, one in ranks.items() if one.waits]
        if not waiting and not somebody_waits and not all(one.what in STANDS for one in ranks.values()):
            self._again = time.monotonic() + HANG_SECONDS
            return  # no rank waits for them: an evaluation, a long step, work between two steps
        loaders = stacks(
            self._folder, {rank: shown[rank] for rank, one in ranks.items() if one.what == LOADER}, of_loaders=True
        )
        ranks = {
            rank: replace(one, loaders=loaders.get(rank, ""), stacks="" if rank in waiting[1:] else one.stacks)
            for rank, one in ranks.items()
        }  # fmt: skip
        self._finding = finding = _Finding(first, ranks, {rank: one.pid for rank, one in shown.items()}, [])
        line = {
            "time": time.time(), "step": first.steps, "seconds": round(seconds, 1), "size": first.about.size,
            "ranks": [asdict(one) for one in ranks.values()],
        }  # fmt: skip
        self._on_disk(lambda: files.append(_file(first), line))
        if len(ranks) == first.about.size:
            self._say(finding, seconds)

    def _settle(self, finding: _Finding, seconds: float) -> None:
        """Reports a rank here that others wait for. If all ranks here wait, another watcher may have the cause. If none has, the
        watcher of the first waiting rank reports."""
        if finding.said:
            return
        if not all(one.waits for one in finding.ranks.values()):
            self._say(finding, seconds)
            return
        size, now = self._on_disk(lambda: _file(finding.first).stat().st_size) or 0, time.monotonic()
        if size != finding.size or not finding.settled:
            finding.size, finding.settled = size, now + SETTLE_SECONDS
        elif now >= finding.settled:
            hang = self._told(finding.first)
            if hang is None or (not hang.causes and hang.ranks[0].rank in finding.ranks):
                self._say(finding, seconds)
            finding.said = True

    def _say(self, finding: _Finding, seconds: float) -> None:
        """Reports on standard error and in the run's events. With `end_hangs`, kills the ranks here that the others wait for."""
        finding.said = True
        first, about = finding.first, finding.first.about
        hang = self._told(first)
        where = f" (stacks: {_file(first)})" if hang is not None else ""
        since = time.localtime(time.time() - seconds)
        hang = hang or _hang(finding.ranks.values(), since, seconds, first.steps, about.size)
        to_stderr(f"hang: {hang.said}{where}")
        event = {
            "event": "hang", "time": round(time.time(), 3), "attempt": about.attempt, "step": hang.step,
            "reason": hang.said, "seconds": round(seconds, 1), "ranks": [one.rank for one in hang.named],
        }  # fmt: skip
        self._on_disk(lambda: files.append(Path(about.run_dir, contract.EVENTS_FILE), event))
        finding.named = [one.rank for one in hang.named if one.rank in finding.ranks]
        ends = finding.named if hang.causes else finding.named[:1]
        for pid in [finding.pids[rank] for rank in ends] if about.ends else []:
            for each in (*children(pid), pid):  # a loader that hangs does not notice the end of its rank
                if each != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def over(self) -> None:
        """Ends the hang: a rank has made progress, or none runs."""
        self._again = 0.0
        if (finding := self._finding) is None:
            return
        now = {rank: known.progress.pid for rank, known in self._ranks.items()}
        same = [rank for rank in finding.named if now.get(rank) == finding.pids[rank]]
        if same:
            to_stderr(f"hang: rank {named(same)} gets further again")
        self._finding, self._disk_answers = None, True
        self._on_disk(lambda: _file(finding.first).unlink(missing_ok=True))

    def _told(self, rank: RankProgress) -> Hang | None:
        """Returns the findings of all watchers of its run."""
        return self._on_disk(lambda: of_run(Path(rank.about.run_dir)))

    def _on_disk(self, task: Callable[[], T]) -> T | None:
        """Runs the task. Returns None if it fails or the disk does not answer. A hang waits for the disk once."""
        done: list[T] = []

        def work() -> None:
            with contextlib.suppress(OSError):
                done.append(task())

        if self._disk_answers:
            thread = threading.Thread(target=work, name="hangs", daemon=True)
            thread.start()
            thread.join(DISK_SECONDS)
            self._disk_answers = not thread.is_alive()
        return done[0] if done else None


def _file(rank: RankProgress) -> Path:
    return Path(rank.about.run_dir, contract.HANG_FILE)


def _stalled_rank(rank: int, progress: RankProgress, text: str) -> StalledRank:
    state = state_of(progress.pid)
    frames = main_frames(text, progress.thread)
    waits = _waits(frames, state)
    if state == "T":
        what = STOPPED
    elif state == "D":
        what = DISK
    elif not frames:
        what = "does not answer"
    elif waits:
        what = "waits for others"
    else:
        what = _what(frames, state)
    return StalledRank(rank, what, _where(frames), waits and state in ("R", "S"), text)


def _waits(frames: list[Frame], state: str) -> bool:
    """Returns whether these frames are of a thread that waits for other ranks: in a collective, for a GPU or in a backward pass."""
    places = ["torch/distributed/", _OURS + "parallel", _OURS + "sync"]
    if state == "S":
        places += ["torch/autograd/", "torch/cuda/"]
    return any(place in frame.file for frame in frames[:6] for place in places)


def _what(frames: list[Frame], state: str) -> str:
    paths = [frame.file for frame in frames[:8]]
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
    for frame in frames:
        if not frame.file.startswith((libraries, _OURS, "<frozen")) and "-packages" + os.sep not in frame.file:
            return str(frame)
    return str(frames[0]) if frames else ""


def main(folder: Path, number: int, pid: int) -> None:
    """Watches this rank, the parent of this process, until it ends or reports by a signal that it is done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    for one in FORWARDED:
        signal.signal(one, signal.SIG_IGN)  # a cluster signals all processes of a job
    hangs = Hangs(folder)
    while os.getppid() == pid and signal.sigtimedwait({SIGNAL}, HANG_LOOK_SECONDS) is None:
        hangs.look([number])
    hangs.over()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
