"""Names the rank that leaves the loop alone, or asks for the next batch without a step, while the others wait for its gradient.

Such a rank goes on to another collective than theirs, and gloo then aborts a process, or sums what does not belong together. So the
ranks meet wherever their ways may part, by messages that no collective is taken for (`exchange.reduced` with a tag). A rank
that waits there says in the store where it is. One that is beyond that place, and gets no further, knows that they never meet.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..limits import DESYNC_LOOK_SECONDS, KNOW_SECONDS
from ..parallel import stores
from ..parallel.exchange import reduced
from ..parallel.process import end_process
from ..parallel.world import World

_TAG = 4  # of the messages of a meeting
_RANKS = 1 << 20  # more than there are
_ATTEMPTS = itertools.count()
_SHAPE = r"(\d{1,18}) (\d{1,18}) (\d{1,9}) ([0-3]) (\d{1,18}) (-?\d{1,9})"
CALLS = ("", "run.sum()", "run.gather()", "run.loss()", "run.for_evaluation()", "run.evaluate()", "run.boundary()")
"""The collectives of a script, by their numbers; "": the script has ended the epoch, or the run."""
_REMEDY = (
    "all ranks make the same steps. Decide alike on all of them, with run.sum() or run.gather(), or end the run with "
    "run.stop(reason), which one rank may call alone"
)
_CALL_REMEDY = "all ranks make the same calls. Make this one on all of them, not only where run.leader is true"


class Place(enum.IntEnum):
    """Where the ways of the ranks may part."""

    LEFT = 0
    SKIPPED = 1
    EPOCH_END = 2
    RUN_END = 3

    @property
    def words(self) -> str:
        return ("left the loop over its batches", "asked for the next batch without a step", "ended the epoch",
                "left the loop over the epochs")[self]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A rank that waits for the others."""

    meeting: int
    moves: int
    rank: int
    place: int
    step: int
    beyond: int = -1
    """A rank that is beyond the place and will not come; -1: none is known."""

    @property
    def text(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} {Place(self.place).words} after step {self.step}, while rank {self.beyond} trains on: {_REMEDY}"


class Meetings:
    """Where the ranks of one attempt meet, and the thread that checks whether they still can.

    Args:
        moves: a count of this rank's steps and polls, the same on all ranks at a meeting; its last two bits: how far a step is.
        steps: optimizer steps done.
        say: gets the sentence, in any thread; then the process ends.
    """

    def __init__(
        self, world: World, moves: Callable[[], int], steps: Callable[[], int], say: Callable[[str], None]
    ) -> None:
        self._world, self._steps, self._say = world, steps, say
        self._met = self._collectives = 0
        self._moves: Callable[[], int] = lambda: moves() + 4 * self._collectives
        self._waiting: _Waiting | None = None
        self._outside = False
        """The script has left the loop over its batches."""
        self._over, self._ending = threading.Event(), threading.Lock()
        self._key = f"lockstep/loop/{next(_ATTEMPTS)}"  # a process may have several runs over one store
        if world.size > 1:
            threading.Thread(target=self._watch, name="desync", daemon=True).start()

    @property
    def places(self) -> dict[str, int]:
        """What is alike on all ranks between two steps, for one that comes to it."""
        return {"met": self._met, "collectives": self._collectives}

    def be_at(self, places: Mapping[str, int]) -> None:
        self._met, self._collectives = places["met"], places["collectives"]

    def close(self) -> None:
        """The attempt is over: nobody meets any more."""
        with self._ending:
            self._over.set()

    def in_loop(self) -> None:
        """The loop over the batches begins."""
        self._outside = False

    def left(self) -> None:
        """The script has left the loop over its batches, perhaps with an error: so nothing waits until it goes on (`go_on`, `meet`)."""
        self._outside = True
        self._waiting = _Waiting(self._met + 1, self._moves(), self._world.rank, Place.LEFT, self._steps())

    def go_on(self, call: str = "") -> None:
        """Before a collective that is called in the loop and after it: `meet`, where the loop was left. In the loop it counts as a move.

        Args:
            call: of `CALLS`; "": a part of another one.
        """
        if call and self._outside:
            self.meet(Place.LEFT, call)
        else:
            self._collectives += 1

    def meet(self, place: Place, call: str = "") -> None:
        """Waits for the other ranks. Ends the process with a sentence where they are elsewhere. Collective, unless it is over."""
        world, moves, step = self._world, self._moves(), self._steps()
        if world.size > 1 and not self._over.is_set():
            self._waiting = _Waiting(self._met + 1, moves, world.rank, place, step)
            number = (((moves >> 2) * len(Place) + place) * len(CALLS) + CALLS.index(call)) * _RANKS + world.rank
            self._compare(*reduced(torch.tensor([number, -number]), world, torch.maximum, _TAG).tolist())
        self._met += 1
        self._waiting = None

    def _compare(self, last: int, first: int) -> None:
        """Ends the process unless all ranks are at the same place: `last` and `-first` are those of two of them."""
        (behind, rank), (ahead, other) = divmod(-first, _RANKS), divmod(last, _RANKS)
        if behind != ahead:
            with self._ending:
                self._end(f"after step {self._steps()}: {_parted(behind, rank, ahead, other)}")

    def _watch(self) -> None:
        """Until the attempt is over, or the store is gone: then gloo says so."""
        before, told = -1, 0
        with contextlib.suppress(RuntimeError):
            store = _get_default_store()
            while not self._over.wait(DESYNC_LOOK_SECONDS):
                moves, waiting = self._moves(), self._waiting
                if waiting is not None and waiting.meeting != told:
                    told = waiting.meeting
                    store.set(self._key, waiting.text)
                if moves == before:
                    self._look(store, moves)
                before = moves

    def _look(self, store: dist.Store, moves: int) -> None:
        """This rank has got no further since it looked before."""
        said = stores.said(store, self._key, _SHAPE) if store.check([self._key]) else ""
        match = re.fullmatch(_SHAPE, said)
        other = None if match is None else _Waiting(*map(int, match.groups()))
        if other is None or other.meeting <= self._met:  # in this order: `moves` was read while they had not met
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
        """Under the lock."""
        if self._over.is_set():
            return
        self._say(sentence)
        end_process()  # the thread that waits in a collective cannot be raised in


def _parted(behind: int, rank: int, ahead: int, other: int) -> str:
    """What `rank` and `other` did, which are not at the same place: one has made fewer moves, or has called something else."""
    (one, call), (another, called) = (
        (Place(code // len(CALLS) % len(Place)), CALLS[code % len(CALLS)]) for code in (behind, ahead)
    )
    if call != called and Place.SKIPPED not in (one, another):
        if not called:
            rank, other, call, called = other, rank, called, call
        does = f"called {call}" if call else "did not"
        return f"rank {other} called {called} after the loop, and rank {rank} {does}: {_CALL_REMEDY}"
    if one != another:
        return f"rank {rank} {one.words}, and rank {other} {another.words}: {_REMEDY}"
    return f"rank {rank} {one.words} before rank {other} did: {_REMEDY}"
