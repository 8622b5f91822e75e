"""The rank that gets no further while the others wait for it: which one, what it does, and where.

In data parallel one rank that stands has all stand. So where none of this node has got anything done for long, by what this run's
steps take, each is asked for its stacks (`resilience/progress.py`). A rank whose main thread is in a collective waits for others, and one
that is elsewhere is what they wait for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sysconfig
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lockstep.training import files
from lockstep.training.contract import HANG_FILE, to_stderr
from lockstep.training.parallel.exchange import named
from lockstep.training.resilience.progress import Frame, Seen, children, main_frames, seen, stacks, state_of

LOOK_SECONDS = 0.5
HANG_SECONDS = 10.0
"""Without progress, at least, until a rank is named."""
FIRST_SECONDS = 300.0
"""The same before the first step: it may compile."""
LONGEST = 4.0
"""And as a multiple of the longest time without progress so far."""
LOADER = "waits for its data loader"
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))
_OURS = os.fspath(Path(__file__).parents[1]) + os.sep


@dataclass
class _Rank:
    found: Seen
    since: float
    """When it last got something done (`time.monotonic`)."""
    longest: float = 0.0
    """Seconds for which it had got nothing done, at most, since its first step."""


@dataclass(frozen=True)
class Standing:
    """A rank that gets no further."""

    rank: int
    what: str
    where: str
    waits: bool
    """For other ranks."""
    text: str
    """Its stacks."""


class Hangs:
    """Of the ranks of a node.

    Args:
        folder: the launcher's own.
        ends: a rank that hangs is killed, so that it is a lost rank like any other.
    """

    def __init__(self, folder: Path, ends: bool) -> None:
        self._folder, self._ends = folder, ends
        self._ranks: dict[int, _Rank] = {}
        self._next = 0.0
        self._told: dict[int, int] = {}
        """The ranks that were named, until something gets done again, and their processes."""
        self._kept: Path | None = None

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
        times = [now - known.since for known in self._ranks.values()]
        if self._told and (not times or min(times) < LOOK_SECONDS):
            self._over()
        if self._told or not times or len(times) < len(ranks):
            return
        begun = all(known.found.of_attempt for known in self._ranks.values())
        longest = max(known.longest for known in self._ranks.values())
        if min(times) > max(HANG_SECONDS if begun else FIRST_SECONDS, LONGEST * longest):
            self._name(min(times))

    def _name(self, seconds: float) -> None:
        texts = stacks(self._folder, {rank: known.found for rank, known in self._ranks.items()})
        standing = [_standing(rank, known.found, texts[rank]) for rank, known in self._ranks.items()]
        causes = [one for one in standing if not one.waits]
        waiting = [one for one in standing if one.waits]
        if not waiting and all(one.what == "computes" for one in causes):
            self._next += HANG_SECONDS
            return  # they do the same: an evaluation, a long step
        self._told = {one.rank: self._ranks[one.rank].found.pid for one in causes or waiting}
        first = next(iter(self._ranks.values())).found
        if causes:
            said = "; ".join(f"rank {one.rank} {one.what}{one.where}" for one in causes)
            say = f"no step for {seconds:.0f} s: {said}" + (
                f", and rank {named([one.rank for one in waiting])} waits" if waiting else ""
            )
        else:
            places = "; ".join(f"rank {one.rank}{one.where}" for one in waiting)
            say = f"no step for {seconds:.0f} s: all ranks here wait for others: {places}"
        loading = {one.rank: self._ranks[one.rank].found for one in causes if one.what == LOADER}
        self._kept = self._keep(first, say, causes, waiting, stacks(self._folder, loading, of_loaders=True))
        to_stderr(f"launch: {say}" + (f" (stacks: {self._kept})" if self._kept else ""))
        if self._ends:
            for one in causes or waiting[:1]:
                pid = self._ranks[one.rank].found.pid
                for each in (*children(pid), pid):  # a loader that hangs would not see its end
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def _keep(
        self, first: Seen, say: str, causes: list[Standing], waiting: list[Standing], of_loaders: dict[int, str]
    ) -> Path | None:
        """What is said, in the run directory, with the stacks of those that are waited for, and of one that waits."""
        path = first.run_dir / HANG_FILE
        told = {
            "said": say, "step": first.steps, "time": time.time(),
            "ranks": [
                {"rank": one.rank, "what": one.what, "where": one.where.strip(" ()"), "stacks": one.text,
                 "loaders": of_loaders.get(one.rank, "")}
                for one in [*causes, *(waiting[:1] if causes else waiting)]
            ],
        }  # fmt: skip
        if not causes and path.exists():
            return None  # the node with the rank that is waited for has said so
        try:
            files.replace_json(path, told)
        except OSError:
            return None
        return path

    def _over(self) -> None:
        same = [rank for rank, pid in self._told.items() if rank in self._ranks and self._ranks[rank].found.pid == pid]
        if same:
            to_stderr(f"launch: rank {named(same)} gets further again")
        self._told = {}
        if self._kept is not None:
            with contextlib.suppress(OSError):
                self._kept.unlink()


def _standing(rank: int, found: Seen, text: str) -> Standing:
    state = state_of(found.pid)
    frames = main_frames(text, found.thread)
    waits = _waits(frames, state)
    if state == "T":
        what = "stands stopped"
    elif state == "D":
        what = "waits for a disk or a device"
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
    own = next(
        (
            one
            for one in frames
            if not one.file.startswith((*_LIBRARIES, _OURS)) and "-packages" + os.sep not in one.file
        ),
        None,
    )
    place = own or (frames[0] if frames else None)
    return f" ({place})" if place is not None else ""
