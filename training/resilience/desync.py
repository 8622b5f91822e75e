"""Names the ranks that do not meet the others, in one sentence, and ends them all.

A rank may leave the loop alone, or ask for the next batch without a step or after fewer steps, while the others wait for its gradient.
Such a rank calls another collective than the others. Then gloo aborts a process, or adds up unrelated tensors. So the ranks synchronise
wherever a script may treat them differently (`DesyncDetector`). The messages have a tag that no collective has (`exchange.all_reduce`).
A rank that waits at a sync point writes into the store which one. A rank that is past this point and is stuck knows that they never meet.

A rank whose collective has failed or timed out reports itself in the store. The ranks that do not report within a few seconds are gone,
stopped or stuck (`describe_failed_collective`). The launcher records in the store which ranks have exited, and the other ranks do not wait
for these. `lockstep.wire.hangs` has said before what the stuck ones do. gloo raises in the thread that waits. With NCCL this thread waits
for the GPU, and torch's watchdog aborts the process.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..contract import EXIT_FAILED, UserError, end_process, first_line
from ..limits import DESYNC_LOOK_SECONDS, KNOW_SECONDS, RAISED_SECONDS, VERDICT_SECONDS
from ..parallel import stores
from ..parallel.exchange import all_reduce
from ..parallel.world import World
from .closeness import SAME_MODE

_TAG = 4  # of the messages of a sync point
_RANKS = 1 << 20  # more than there are
_ATTEMPTS, _RAISED = itertools.count(), itertools.count()  # a process may have several runs over one store
_SHAPE = r"(\d{1,18}) (\d{1,18}) (\d{1,9}) ([0-5]) (\d{1,18}) (-?\d{1,9})"
CALLS = (
    "", "run.sum()", "run.gather()", "run.loss()", "run.for_evaluation()", "run.evaluate()", "run.boundary()", "run.part()",
)  # fmt: skip
"""The collectives of a script, by their numbers; "": none, as the epoch or the run ends."""
_REMEDY = (
    "all ranks make the same steps. Decide alike on all of them, with run.sum() or run.gather(), or end the run with "
    "run.stop(reason), which one rank may call alone"
)
_CALL_REMEDY = "all ranks make the same calls. Make this one on all of them, not only where run.leader is true"
_SOURCE = re.compile(r"^\[[^]]*\] ")
"""The place in a library's sources, which begins its message."""


class Place(enum.Enum):
    """A sync point, in the words of a message: here a script may treat the ranks differently."""

    LEFT = "left the loop over its batches"
    SKIPPED = "asked for the next batch without a step"
    AGAIN = "takes another step of its batch"
    NEXT = "asked for the next batch"
    EPOCH_END = "ended the epoch"
    RUN_END = "left the loop over the epochs"


_PLACES = [*Place]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A rank that waits for the others at a sync point."""

    meeting: int
    moves: int
    rank: int
    place: int
    """The index of its `Place`."""
    step: int
    beyond: int = -1
    """A rank that is past the sync point and will not come; -1: none is known."""

    @property
    def text(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} {_PLACES[self.place].value} after step {self.step}, while rank {self.beyond} trains on: {_REMEDY}"


class DesyncDetector:
    """Synchronises the ranks of one attempt, and checks in a thread whether they still can meet.

    Args:
        moves: counts this rank's steps and polls. The count is the same on all ranks at a sync point. Its last two bits are the
            stage of the step.
        steps: returns the number of optimizer steps.
        say: gets the sentence, in any thread; then the process ends.
    """

    def __init__(
        self, world: World, moves: Callable[[], int], steps: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._world, self._steps, self._say = world, steps, say
        self.met = self.collectives = 0
        """Sync points that this rank has passed, and its collectives between them. A rank that is admitted continues with these counts."""
        self._moves: Callable[[], int] = lambda: moves() + 4 * self.collectives
        self._waiting: _Waiting | None = None
        self.steps_a_batch = 1
        """Steps of the last batch of which there were any."""
        self.outside = False
        """Whether the script has left the loop over its batches. A loop that begins clears it."""
        self._over, self._ending = threading.Event(), threading.Lock()
        self._key = f"lockstep/loop/{next(_ATTEMPTS)}"
        if world.size > 1:
            threading.Thread(target=self._watch, name="desync", daemon=True).start()

    def close(self) -> None:
        """Ends the check: the attempt is over."""
        with self._ending:
            self._over.set()

    def leave_loop(self) -> None:
        """Notes that the script has left the loop over its batches. It may have raised an error, so the rank waits at its next
        collective only."""
        self.outside = True
        place = _PLACES.index(Place.LEFT)
        self._waiting = _Waiting(self.met + 1, self._moves(), self._world.rank, place, self._steps())

    def collective(self, call: str = "") -> None:
        """Counts a collective of the script as a move. After the loop it is a sync point.

        Args:
            call: one of `CALLS`; "": a part of another collective.
        """
        if call and self.outside:
            self.sync_point(Place.LEFT, call)
        else:
            self.collectives += 1

    def begin_step(self, made: int) -> None:
        """Synchronises the ranks before a step of a batch that goes beyond those of the batch before. Collective then.

        Args:
            made: this rank's steps of the batch so far.
        """
        if made >= self.steps_a_batch:
            self.sync_point(Place.AGAIN)

    def end_batch(self, made: int) -> None:
        """Synchronises the ranks after a batch of fewer steps than the batch before. Collective then."""
        if made < self.steps_a_batch:
            self.sync_point(Place.NEXT if made else Place.SKIPPED)
        self.steps_a_batch = made or self.steps_a_batch

    def sync_point(self, place: Place, call: str = "") -> None:
        """Waits for the other ranks. Ends the process with a sentence if they are at another sync point. Collective."""
        world, moves, step, at = self._world, self._moves(), self._steps(), _PLACES.index(place)
        if world.size > 1 and not self._over.is_set():
            self._waiting = _Waiting(self.met + 1, moves, world.rank, at, step)
            number = (((moves >> 2) * len(_PLACES) + at) * len(CALLS) + CALLS.index(call)) * _RANKS + world.rank
            last, first = all_reduce(torch.tensor([number, -number]), world, torch.maximum, _TAG).tolist()
            (behind, rank), (ahead, other) = divmod(-first, _RANKS), divmod(last, _RANKS)
            if behind != ahead:
                with self._ending:
                    self._end(f"after step {step}: {_parted(behind, rank, ahead, other)}")
        self.met += 1
        self._waiting = None

    def _watch(self) -> None:
        """Checks until the attempt is over. Where the store is gone, gloo reports an error."""
        previous, written = -1, 0
        with contextlib.suppress(RuntimeError):
            store = _get_default_store()
            while not self._over.wait(DESYNC_LOOK_SECONDS):
                moves, waiting = self._moves(), self._waiting
                if waiting is not None and waiting.meeting != written:
                    written = waiting.meeting
                    store.set(self._key, waiting.text)
                if moves == previous:
                    self._look(store, moves)
                previous = moves

    def _look(self, store: dist.Store, moves: int) -> None:
        """Looks for a rank that waits in vain: this rank has made no move since the last look."""
        match = re.fullmatch(_SHAPE, stores.text_at(store, self._key, _SHAPE))
        other = None if match is None else _Waiting(*map(int, match.groups()))
        if other is None or other.meeting <= self.met:  # in this order: `moves` was read while they had not met
            return
        if other.beyond < 0 and moves > other.moves:
            other = replace(other, beyond=self._world.rank)
            store.set(self._key, other.text)
        if other.beyond >= 0:
            with self._ending:  # what this rank waits for fails when another rank ends
                with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
                    stores.meet(store, f"{self._key}/know", self._world.size, KNOW_SECONDS)
                    stores.meet(store, f"{self._key}/end", self._world.size, KNOW_SECONDS, waits=self._world.leader)
                self._end(other.sentence)

    def _end(self, sentence: str) -> None:
        """Ends the process with this sentence. The caller holds the lock."""
        if self._over.is_set():
            return
        self._say(sentence)
        end_process(EXIT_FAILED)  # the thread that waits in a collective cannot be raised in


def _parted(behind: int, rank: int, ahead: int, other: int) -> str:
    """Returns a sentence about `rank` and `other`: one has made fewer moves, or has called another collective."""
    (one, call), (another, called) = (
        (_PLACES[code // len(CALLS) % len(_PLACES)], CALLS[code % len(CALLS)]) for code in (behind, ahead)
    )
    if call != called and not {Place.SKIPPED, Place.AGAIN, Place.NEXT} & {one, another}:
        if not called:
            rank, other, call, called = other, rank, called, call
        does = f"called {call}" if call else "did not"
        return f"rank {other} called {called} after the loop, and rank {rank} {does}: {_CALL_REMEDY}"
    if one != another:
        return f"rank {rank} {one.value}, and rank {other} {another.value}: {_REMEDY}"
    return f"rank {rank} {one.value} before rank {other} did: {_REMEDY}"


def describe_failed_collective(world: World, step: int, error: BaseException) -> str:
    """Returns a sentence for an error of a collective: the ranks that did not report, and how they have ended."""
    cause = _SOURCE.sub("", first_line(error)).split(". ")[0][:200]
    try:
        missing, unlike = _missing(world)
    except (RuntimeError, ValueError):  # torch's DistError and DistStoreError among them
        return f"step {step}: lost rank 0, which holds the store, or the network to it ({cause})"
    if missing:
        return f"step {step}: {'; '.join(missing)} ({cause}){unlike and f'. {unlike}'}"
    if unlike:
        return f"step {step}: {unlike}"
    if world.live is not None and world.generation:
        return f"step {step}: {world.live.of_gone_group(cause)}"
    return f"step {step}: a collective failed, although every rank is present ({cause})"


def _trains_unlike(store: dist.Store, ranks: Iterable[int]) -> str:
    """Returns a sentence about a parameter that trains since this step on some of these ranks only; "": there is none."""
    texts = {rank: stores.text_at(store, stores.trained(rank), r"\d{1,9} [ -~]+") or "0 " for rank in ranks}
    changes = {rank: int(text.split()[0]) for rank, text in texts.items()}
    first, last = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
    if changes[first] == changes[last]:
        return ""
    return f"rank {last} trains {texts[last].partition(' ')[2]} since this step, and rank {first} does not. {SAME_MODE}"


def first_of_node(world: World) -> bool:
    """Returns whether this rank is the first of its node that asks. It prints for all why they end. If rank 0 is lost, and the store
    with it, every rank prints."""
    with contextlib.suppress(RuntimeError, ValueError):  # after a group that could not be formed there is none
        return bool(_get_default_store().add(f"lockstep/failed/node/{world.node}", 1) == 1)
    return True


def _missing(world: World) -> tuple[list[str], str]:
    """Returns a sentence for each rank that did not report a failed collective within a few seconds, with how it has ended; and
    `_trains_unlike` of the others, and of those that gloo has aborted."""
    store = _get_default_store()
    launchers = stores.without_prefix(store)
    store.set(f"lockstep/failed/{world.rank}", "1")
    missing, lost = [], set[int]()
    deadline = time.monotonic() + VERDICT_SECONDS
    for rank in range(world.size):
        key, ended = [f"lockstep/failed/{rank}"], stores.ended(rank)
        # Asked again and again: `store.wait` would print warnings of torch's own about a wait that is meant to end so.
        while not (reported := store.check(key)) and time.monotonic() < deadline and not launchers.check([ended]):
            time.sleep(0.05)
        if not reported:
            why = stores.text_at(launchers, ended, r"[ -~]+")
            missing.append(f"rank {rank} did not arrive{f': {why}' if why else ''}")
            if why and "SIGABRT" not in why:
                lost.add(rank)
    unlike = _trains_unlike(store, {*range(world.size)} - lost)
    stores.meet(store, "lockstep/failed/know", world.size - len(missing), RAISED_SECONDS, waits=world.leader)
    return missing, unlike


def prints(world: World, error: UserError) -> bool:
    """Returns whether this rank prints the error: of the ranks that raise the same error, one prints it."""
    if world.size > 1 and not error.shared:
        key = f"lockstep/raised/{next(_RAISED)}"
        with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
            store = _get_default_store()
            first = store.add(f"{key}/{hashlib.sha256(str(error).encode()).hexdigest()}", 1) == 1
            stores.meet(store, f"{key}/know", world.size, RAISED_SECONDS, waits=world.leader)
            return first
    return True
