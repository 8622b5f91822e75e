"""Names the ranks that do not meet the others, in one sentence, and ends them all.

A rank may leave the loop alone, or ask for the next batch without a step, while the others wait for its gradient. Such a rank calls
another collective than the others. Then gloo aborts a process, or adds up unrelated tensors. So the ranks synchronise wherever a script
may treat them differently (`DesyncDetector`). The messages have a tag that no collective has (`exchange.all_reduce`).
A rank that waits at a sync point writes into the store which one. A rank that is past this point and is stuck knows that they never meet.

A rank whose collective has failed or timed out reports itself in the store. The ranks that do not report within a few seconds are gone,
stopped or stuck (`describe_failed_collective`). The launcher records in the store which ranks have exited, and the other ranks do not wait
for these. What the stuck ones do is the verdict of `lockstep.wire.hangs`. gloo raises in the thread that waits. With NCCL this thread waits
for the GPU, and torch's watchdog aborts the process. `naming_the_missing` prints the sentence before.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.wire import hangs

from ..contract import ENV_NOTE, ENV_RESTARTS, UserError, to_stderr
from ..limits import DESYNC_LOOK_SECONDS, KNOW_SECONDS, RAISED_SECONDS, VERDICT_SECONDS
from ..parallel import stores
from ..parallel.exchange import all_reduce
from ..parallel.process import end_process
from ..parallel.world import World

_TAG = 4  # of the messages of a sync point
_RANKS = 1 << 20  # more than there are
_ATTEMPTS = itertools.count()
_SHAPE = r"(\d{1,18}) (\d{1,18}) (\d{1,9}) ([0-3]) (\d{1,18}) (-?\d{1,9})"
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


class Place(enum.IntEnum):
    """A sync point: here a script may treat the ranks differently."""

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
    """A rank that waits for the others at a sync point."""

    meeting: int
    moves: int
    rank: int
    place: int
    step: int
    beyond: int = -1
    """A rank that is past the sync point and will not come; -1: none is known."""

    @property
    def text(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} {Place(self.place).words} after step {self.step}, while rank {self.beyond} trains on: {_REMEDY}"


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
        self._met = self._collectives = 0
        self._moves: Callable[[], int] = lambda: moves() + 4 * self._collectives
        self._waiting: _Waiting | None = None
        self._outside = False
        """The script has left the loop over its batches."""
        self._over, self._ending = threading.Event(), threading.Lock()
        self._key = f"lockstep/loop/{next(_ATTEMPTS)}"  # a process may have several runs over one store
        if world.size > 1:
            threading.Thread(target=self._watch, name="desync", daemon=True).start()

    def state_dict(self) -> dict[str, int]:
        """Returns the counts that all ranks share between two steps, for a rank that is admitted."""
        return {"met": self._met, "collectives": self._collectives}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues with the counts of the other ranks."""
        self._met, self._collectives = state["met"], state["collectives"]

    def close(self) -> None:
        """Ends the check: the attempt is over."""
        with self._ending:
            self._over.set()

    def enter_loop(self) -> None:
        """The loop over the batches begins."""
        self._outside = False

    def leave_loop(self) -> None:
        """Notes that the script has left the loop over its batches. It may have raised an error, so the rank waits at its next
        collective only."""
        self._outside = True
        self._waiting = _Waiting(self._met + 1, self._moves(), self._world.rank, Place.LEFT, self._steps())

    def collective(self, call: str = "") -> None:
        """Counts a collective of the script as a move. After the loop it is a sync point.

        Args:
            call: one of `CALLS`; "": a part of another collective.
        """
        if call and self._outside:
            self.sync_point(Place.LEFT, call)
        else:
            self._collectives += 1

    def sync_point(self, place: Place, call: str = "") -> None:
        """Waits for the other ranks. Ends the process with a sentence if they are at another sync point. Collective."""
        world, moves, step = self._world, self._moves(), self._steps()
        if world.size > 1 and not self._over.is_set():
            self._waiting = _Waiting(self._met + 1, moves, world.rank, place, step)
            number = (((moves >> 2) * len(Place) + place) * len(CALLS) + CALLS.index(call)) * _RANKS + world.rank
            self._compare(*all_reduce(torch.tensor([number, -number]), world, torch.maximum, _TAG).tolist())
        self._met += 1
        self._waiting = None

    def _compare(self, last: int, first: int) -> None:
        """Ends the process unless all ranks are at the same sync point. `last` and `-first` are the largest and the smallest code."""
        (behind, rank), (ahead, other) = divmod(-first, _RANKS), divmod(last, _RANKS)
        if behind != ahead:
            with self._ending:
                self._end(f"after step {self._steps()}: {_parted(behind, rank, ahead, other)}")

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
        match = re.fullmatch(_SHAPE, stores.said(store, self._key, _SHAPE))
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
        """Ends the process with this sentence. The caller holds the lock."""
        if self._over.is_set():
            return
        self._say(sentence)
        end_process()  # the thread that waits in a collective cannot be raised in


def _parted(behind: int, rank: int, ahead: int, other: int) -> str:
    """Returns a sentence about `rank` and `other`: one has made fewer moves, or has called another collective."""
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


def describe_failed_collective(world: World, step: int, error: BaseException, run_dir: Path) -> str:
    """Returns a sentence for an error of a collective: the ranks that did not report, and why."""
    cause = _SOURCE.sub("", (str(error) or type(error).__name__).splitlines()[0]).split(". ")[0][:200]
    try:
        missing = _missing(world, run_dir)
    except (RuntimeError, ValueError):  # torch's DistError and DistStoreError among them
        return f"step {step}: lost rank 0, which holds the store, or the network to it ({cause})"
    if missing:
        return f"step {step}: {'; '.join(missing)} ({cause})"
    if world.live is not None and world.generation:
        return f"step {step}: {world.live.of_gone_group(cause)}"
    return f"step {step}: a collective failed, although every rank is present ({cause})"


@contextlib.contextmanager
def naming_the_missing(
    world: World, step: Callable[[], int], say: Callable[[str], None], run_dir: Path
) -> Iterator[None]:
    """Inside, reports a collective of NCCL that fails or times out in a sentence, and ends the process with 1.

    A torch without abort hooks (before 2.15) aborts the process itself. `lockstep.wire.hangs` has named the rank by then.

    Args:
        step: returns the number of steps.
        say: gets the sentence, in another thread than this one.
    """
    nccl = world.size > 1 and world.nccl
    backend = world.group._get_backend(world.device) if nccl else None
    if not getattr(backend, "supports_abort_hooks", False):
        yield
        return
    telling, left = threading.Lock(), threading.Event()

    def end() -> None:
        with telling:
            if not left.is_set():
                error = RuntimeError("a collective of NCCL failed or timed out")
                say(describe_failed_collective(world, step(), error, run_dir))
                end_process()  # the thread that waits for the GPU cannot be raised in

    backend.register_abort_hook(id(left), end)  # type: ignore[union-attr]
    try:
        yield
    finally:
        with telling:  # a thread that is reporting ends the process
            left.set()
        backend.unregister_abort_hook(id(left))  # type: ignore[union-attr]


def first_of_node(world: World) -> bool:
    """Returns whether this rank is the first of its node that asks. It prints for all why they end. Under another launcher every rank
    prints it if rank 0 is lost, which holds the store."""
    if note := os.environ.get(ENV_NOTE):
        try:
            Path(f"{note}.failed-{os.environ.get(ENV_RESTARTS)}").touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass
        return True
    with contextlib.suppress(RuntimeError):
        return bool(_get_default_store().add(f"lockstep/failed/node/{world.node}", 1) == 1)
    return True


def _missing(world: World, run_dir: Path) -> list[str]:
    """Returns a sentence for each rank that did not report a failed collective within a few seconds: how it has ended, or what it does."""
    store, stalled = _get_default_store(), dict[int, str]()
    launchers = stores.without_prefix(store)
    store.set(f"lockstep/failed/{world.rank}", "1")

    def read() -> None:
        if (hang := hangs.of_run(run_dir)) is not None:
            stalled.update((one.rank, one.activity) for one in hang.named)

    # A disk that hangs is waited for no longer than the ranks.
    threading.Thread(target=read, name="verdict", daemon=True).start()
    missing = []
    deadline = time.monotonic() + VERDICT_SECONDS
    for rank in range(world.size):
        key, ended = [f"lockstep/failed/{rank}"], stores.ended(rank)
        # Asked again and again: `store.wait` would print warnings of torch's own about a wait that is meant to end so.
        while not (reported := store.check(key)) and time.monotonic() < deadline and not launchers.check([ended]):
            time.sleep(0.05)
        if not reported:
            why = stores.said(launchers, ended, r"[ -~]+") or stalled.get(rank, "")
            missing.append(f"rank {rank} did not arrive{f': {why}' if why else ''}")
    stores.meet(store, "lockstep/failed/know", world.size - len(missing), RAISED_SECONDS, waits=world.leader)
    return missing


def print_once(world: World, error: BaseException) -> None:
    """Has the traceback printed on rank 0 alone, and a line on every other rank that raises the same error in the same place. A
    `UserError` is printed on rank 0 alone."""
    shared = isinstance(error, UserError) and error.shared
    if world.size == 1 or shared or isinstance(error, (SystemExit, KeyboardInterrupt)):
        return
    digest = hashlib.sha256("".join(traceback.format_exception(error)).encode(errors="replace")).hexdigest()
    key, deadline, same = "lockstep/raised", time.monotonic() + RAISED_SECONDS, False
    with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
        store = _get_default_store()
        if world.leader:
            store.set(key, digest)
        while not store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.05)
        same = stores.said(store, key, "[0-9a-f]{64}") == digest
        stores.meet(store, f"{key}/know", world.size, RAISED_SECONDS, waits=world.leader)
    if isinstance(error, UserError):
        error.shared = same
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            to_stderr(
                f"rank {world.rank}: {kind.__name__}: {str(raised).partition(chr(10))[0]} (the same as on rank 0)"
            )
        else:
            before(kind, raised, trace)

    if same and not world.leader:
        sys.excepthook = hook
