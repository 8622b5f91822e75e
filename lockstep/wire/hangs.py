"""The rank that gets no further while the others wait for it: which one, what it does, and where.

In data parallel one rank that stands has all stand. So where none of the ranks that somebody watches has got anything done for long, by
what this run's steps take, each is asked for its stacks (`progress.py`). A rank whose main thread is in a collective waits for others,
and one that is elsewhere is what they wait for. A launcher watches the ranks of its node. Where no launcher of ours has started a rank,
a process watches it alone:

    python -m lockstep.wire.hangs FOLDER NUMBER PID      # where it shows its progress, its number, its process

What each of them finds it adds to a file in the run directory, a line each. There the findings meet (`told`).
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
from lockstep.wire.progress import SIGNAL, Frame, Seen, children, main_frames, place_of, seen, stacks, state_of
from lockstep.wire.signals import FORWARDED

LOOK_SECONDS = 0.5
HANG_SECONDS = 10.0
"""Without progress, at least, until a rank is named."""
FIRST_SECONDS = 300.0
"""The same before the first step: it may compile."""
LONGEST = 4.0
"""And as a multiple of the longest time without progress so far."""
SETTLE_SECONDS = 2.0
"""Without a further finding, until somebody says that all who are heard of wait for others."""
DISK_SECONDS = 2.0
"""For the run directory, whose disk may be what a rank waits for."""
MOST_BYTES, MOST_RANKS = 64 << 20, 1 << 16
"""Of the file that is read, and of those that are named where nothing is heard of them."""
LOADER, STOPPED, DISK = "waits for its data loader", "stands stopped", "waits for a disk or a device"
STANDS = (LOADER, STOPPED, DISK)
"""What is a hang also where no rank waits for another one."""
_OURS = os.fspath(Path(contract.__file__).parent) + os.sep
T = TypeVar("T")


@dataclass(frozen=True)
class Standing:
    """A rank that gets no further."""

    rank: int
    what: str
    where: str
    """Its line and function, the innermost of the user's own; "" where it does not answer."""
    waits: bool
    """For other ranks."""
    stacks: str = ""
    """Of its threads. Of ranks that wait, one has them."""
    loaders: str = ""
    """Those of the processes of its data loader, where it waits for them."""


@dataclass(frozen=True)
class Hang:
    """What all who watch have found."""

    said: str
    step: int
    ranks: list[Standing]
    """First those that the others wait for."""

    @property
    def causes(self) -> list[Standing]:
        return [one for one in self.ranks if not one.waits]

    @property
    def named(self) -> list[Standing]:
        """Those that the others wait for. Where none is known, all that wait: they do different things."""
        return self.causes or self.ranks


def told(data: bytes) -> Hang | None:
    """What the lines of the file say together; None where there is none that can be read."""
    found: dict[int, Standing] = {}
    step = size = 0
    began = seconds = 0.0
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            value = files.parsed(line)
            ranks = [_standing_of(one) for one in value["ranks"]]
            step, size, quiet = int(value["step"]), int(value["size"]), float(value["seconds"])
            if quiet > seconds:
                began, seconds = float(value["time"]) - quiet, quiet
            found.update((one.rank, one) for one in ranks)
    return _hang(found.values(), began, seconds, step, size) if found else None


def _hang(found: Iterable[Standing], began: float, seconds: float, step: int, size: int) -> Hang:
    ranks = sorted(found, key=lambda one: (one.waits, one.rank))
    since = time.strftime("%H:%M:%S", time.localtime(began))
    return Hang(f"no step for {seconds:.0f} s, since {since}, after step {step}: {_sentence(ranks, size)}", step, ranks)


def _standing_of(value: dict[str, Any]) -> Standing:
    """Raises `ValueError`, `TypeError`, `KeyError`."""
    texts = {name: value[name] for name in ("what", "where", "stacks", "loaders") if isinstance(value[name], str)}
    return Standing(rank=int(value["rank"]), waits=bool(value["waits"]), **texts)


def of_run(run_dir: Path) -> Hang | None:
    """None where no rank of the run is said to hang."""
    try:
        return told(files.read(run_dir / contract.HANG_FILE, MOST_BYTES))
    except (OSError, ValueError):
        return None


def _sentence(ranks: list[Standing], size: int) -> str:
    causes, waiting = [one for one in ranks if not one.waits], [one.rank for one in ranks if one.waits]
    if causes:
        said = "; ".join(f"rank {one.rank} {one.what}{f' ({one.where})' if one.where else ''}" for one in causes)
        others = f"rank {named(waiting)} waits" if len(waiting) == 1 else f"ranks {named(waiting)} wait"
        return f"{said}, and {others}" if waiting else said
    places: dict[str, list[int]] = {}
    for one in ranks:
        places.setdefault(one.where, []).append(one.rank)
    said = "; ".join(f"rank {named(there)} ({where})" for where, there in places.items())
    silent = sorted(set(range(size)) - set(waiting)) if max(waiting) < size <= MOST_RANKS else []
    if silent:
        return f"{said} waits for others, and nothing is heard of rank {named(silent)}"
    return f"all ranks wait for others: {said}"


def of_process(rank: int, pid: int) -> dict[str, Any]:
    """What the process of a rank does now, with its stacks: a `Standing`, its process and its step."""
    if (found := place_of(pid)) is None:
        nothing = Standing(rank, "shows nothing: it has not begun its steps, or has ended them", "", waits=False)
        return {**asdict(nothing), "pid": pid, "step": None}
    folder, number, shown = found
    standing = _standing(rank, shown, stacks(folder, {number: shown})[number])
    loaders = stacks(folder, {number: shown}, of_loaders=True)[number] if children(pid) else ""
    return {**asdict(standing), "loaders": loaders, "pid": pid, "step": shown.steps}


@dataclass
class _Rank:
    found: Seen
    since: float
    """When it last got something done (`time.monotonic`)."""
    longest: float = 0.0
    """Seconds for which it had got nothing done, at most, since its first step."""


@dataclass
class _Finding:
    """That no rank here gets further, until one does."""

    first: Seen
    """One of the ranks."""
    ranks: dict[int, Standing]
    pids: dict[int, int]
    named: list[int]
    """Those whose name this one has said."""
    said: bool = False
    """What there is to say of it was said, here or by another."""
    size: int = 0
    """Of the file, when it was looked at last."""
    settled: float = 0.0
    """When it will not have changed for long (`time.monotonic`)."""


class Hangs:
    """Watches some ranks of a node.

    Args:
        folder: where they show their progress.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ranks: dict[int, _Rank] = {}
        self._next = 0.0
        self._again = 0.0
        """No rank here waits for another one: when they are asked again."""
        self._finding: _Finding | None = None
        self._disk_answers = True

    def look(self, ranks: Collection[int]) -> None:
        """To be called again and again, with the ranks that run here."""
        now = time.monotonic()
        if now < self._next:
            return
        late, self._next = now - self._next > 10 * LOOK_SECONDS, now + LOOK_SECONDS
        for rank in [rank for rank in self._ranks if rank not in ranks]:
            del self._ranks[rank]
        for rank in ranks:
            found, known = seen(self._folder, rank), self._ranks.get(rank)
            if found is None or not state_of(found.pid):
                self._ranks.pop(rank, None)
            elif known is None or known.found.pid != found.pid:
                self._ranks[rank] = _Rank(found, now)
            elif known.found.done != found.done:
                quiet = now - known.since
                self._ranks[rank] = _Rank(found, now, max(known.longest, quiet if known.found.of_attempt else 0.0))
            elif late:  # this process was stopped, and they perhaps, too
                known.since = now
        quiet = min((now - known.since for known in self._ranks.values()), default=0.0)
        if quiet < LOOK_SECONDS:
            self.over()
        elif self._finding is not None:
            self._settle(self._finding, quiet)
        elif len(self._ranks) == len(ranks) and quiet > self._bound():
            self._find(quiet)

    def _bound(self) -> float:
        begun = all(known.found.of_attempt for known in self._ranks.values())
        longest = max(known.longest for known in self._ranks.values())
        return max(HANG_SECONDS if begun else FIRST_SECONDS, LONGEST * longest)

    def _find(self, seconds: float) -> None:
        shown = {rank: known.found for rank, known in self._ranks.items()}
        first = next(iter(shown.values()))
        others = self._told(first)
        somebody_waits = others is not None and any(one.waits for one in others.ranks)
        if time.monotonic() < self._again and not somebody_waits:
            return
        texts = stacks(self._folder, shown)
        ranks = {rank: _standing(rank, one, texts[rank]) for rank, one in shown.items()}
        waiting = [rank for rank, one in ranks.items() if one.waits]
        if not waiting and not somebody_waits and not all(one.what in STANDS for one in ranks.values()):
            self._again = time.monotonic() + HANG_SECONDS
            return  # nobody waits for them: an evaluation, a long step, something else between two steps
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
        """Whoever has a rank that others wait for says so. Where all wait here, another may have it. Else the first of those who wait
        says so."""
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
        """On standard error, and in the run's events. Ends the ranks here that the others wait for, where the run asks for that."""
        finding.said = True
        first, about = finding.first, finding.first.about
        hang = self._told(first)
        where = f" (stacks: {_file(first)})" if hang is not None else ""
        hang = hang or _hang(finding.ranks.values(), time.time() - seconds, seconds, first.steps, about.size)
        to_stderr(f"hang: {hang.said}{where}")
        event = {
            "event": "hang", "time": round(time.time(), 3), "attempt": about.attempt, "step": hang.step,
            "reason": hang.said, "seconds": round(seconds, 1), "ranks": [one.rank for one in hang.named],
        }  # fmt: skip
        self._on_disk(lambda: files.append(Path(about.run_dir, contract.EVENTS_FILE), event))
        finding.named = [one.rank for one in hang.named if one.rank in finding.ranks]
        ends = finding.named if hang.causes else finding.named[:1]
        for pid in [finding.pids[rank] for rank in ends] if about.ends else []:
            for each in (*children(pid), pid):  # a loader that hangs would not see its end
                if each != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def over(self) -> None:
        """Something gets done here, or nothing runs."""
        self._again = 0.0
        if (finding := self._finding) is None:
            return
        now = {rank: known.found.pid for rank, known in self._ranks.items()}
        same = [rank for rank in finding.named if now.get(rank) == finding.pids[rank]]
        if same:
            to_stderr(f"hang: rank {named(same)} gets further again")
        self._finding, self._disk_answers = None, True
        self._on_disk(lambda: _file(finding.first).unlink(missing_ok=True))

    def _told(self, rank: Seen) -> Hang | None:
        """What all who watch its run have found."""
        return self._on_disk(lambda: of_run(Path(rank.about.run_dir)))

    def _on_disk(self, task: Callable[[], T]) -> T | None:
        """What it returns; None where it fails, or the disk does not answer. That is waited for once in a hang."""
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


def _file(rank: Seen) -> Path:
    return Path(rank.about.run_dir, contract.HANG_FILE)


def _standing(rank: int, found: Seen, text: str) -> Standing:
    state = state_of(found.pid)
    frames = main_frames(text, found.thread)
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
    return Standing(rank, what, _where(frames), waits and state in ("R", "S"), text)


def _waits(frames: list[Frame], state: str) -> bool:
    """Whether these are of a thread that waits for other ranks: in a collective, or on a GPU, or in a backward pass, for one."""
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
    """The innermost line of the user's own, else the innermost one."""
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


def main(folder: Path, number: int, pid: int) -> None:
    """Watches this rank, whose child this process is, until it ends, or says by a signal that it has got all done."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    for one in FORWARDED:
        signal.signal(one, signal.SIG_IGN)  # a cluster sends them to all processes of a job
    hangs = Hangs(folder)
    while os.getppid() == pid and signal.sigtimedwait({SIGNAL}, LOOK_SECONDS) is None:
        hangs.look([number])
    hangs.over()
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
