"""Names the missing ranks when a collective fails or times out, with the last step of each.

Every rank writes its step into the store about once a second. A rank whose collective has failed reports itself in the store.
The ranks that do not report within a few seconds are gone, stopped or stuck. The launcher records in the store which ranks have
exited, and the other ranks do not wait for these.

gloo raises in the thread that waits. With NCCL this thread waits for the GPU, and torch's watchdog aborts the process.
`naming_the_missing` prints the sentence before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from torch.distributed.distributed_c10d import _get_default_store

from ..contract import ENV_NOTE, ENV_RESTARTS, UserError, to_stderr
from ..limits import RAISED_SECONDS, VERDICT_SECONDS
from ..observe.clock import Observer, StepDone
from ..parallel import stores
from ..parallel.process import end_process
from ..parallel.world import World

_PLACE = re.compile(r"^\[[^]]*\] ")
"""The place in a library's sources, which begins its message."""


class Heartbeat(Observer):
    """Writes this rank's step to the store, at most once a second."""

    def __init__(self, world: World) -> None:
        self._world, self._last = world, -1.0

    def step_done(self, step: StepDone) -> None:
        if self._world.size > 1 and time.monotonic() - self._last >= 1.0:
            self._last = time.monotonic()
            _get_default_store().set(f"lockstep/step/{self._world.rank}", str(step.step))


def describe_failed_collective(world: World, step: int, error: BaseException) -> str:
    """Returns a sentence for an error of a collective: the ranks that did not report, and the last step of each."""
    cause = _PLACE.sub("", (str(error) or type(error).__name__).splitlines()[0]).split(". ")[0][:200]
    try:
        missing = _missing(world, step)
    except (RuntimeError, ValueError):  # torch's DistError and DistStoreError among them
        return f"step {step}: lost rank 0, which holds the store, or the network to it ({cause})"
    if missing:
        return f"step {step}: {'; '.join(missing)} ({cause})"
    if world.live is not None and world.generation:
        return f"step {step}: {world.live.of_gone_group(cause)}"
    return f"step {step}: a collective failed, although every rank is present ({cause})"


@contextlib.contextmanager
def naming_the_missing(world: World, step: Callable[[], int], say: Callable[[str], None]) -> Iterator[None]:
    """Inside, reports a collective of NCCL that fails or times out in a sentence, and ends the process with 1.

    A torch without abort hooks (before 2.15) aborts the process itself. `lockstep.wire.hangs` has named the rank by then.

    Args:
        step: returns the number of steps.
        say: gets the sentence, in another thread than this one.
    """
    nccl = world.size > 1 and world.nccl and world.live is None  # under `--live` the ranks look for themselves
    backend = world.group._get_backend(world.device) if nccl else None
    if not getattr(backend, "supports_abort_hooks", False):
        yield
        return
    telling, left = threading.Lock(), threading.Event()

    def end() -> None:
        with telling:
            if not left.is_set():
                say(describe_failed_collective(world, step(), RuntimeError("a collective of NCCL failed or timed out")))
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


def _missing(world: World, step: int) -> list[str]:
    """Returns a sentence for each rank that did not report a failed collective within a few seconds."""
    store = _get_default_store()
    launchers = stores.without_prefix(store)
    store.set(f"lockstep/failed/{world.rank}", str(step))
    missing = []
    deadline = time.monotonic() + VERDICT_SECONDS
    for rank in range(world.size):
        key, ended = [f"lockstep/failed/{rank}"], stores.ended(rank)
        # Asked again and again: `store.wait` would print warnings of torch's own about a wait that is meant to end so.
        while not (reported := store.check(key)) and time.monotonic() < deadline and not launchers.check([ended]):
            time.sleep(0.05)
        if not reported:
            at = stores.said(store, f"lockstep/step/{rank}", r"\d{1,18}")
            how = stores.said(launchers, ended, r"[ -~]+")
            last, how = f"last seen at step {at}" if at else "no step recorded", f": {how}" if how else ""
            missing.append(f"rank {rank} did not arrive{how} ({last})")
    stores.meet(store, "lockstep/failed/know", world.size - len(missing), RAISED_SECONDS, waits=world.leader)
    return missing


def print_once(world: World, error: BaseException) -> None:
    """Has the traceback printed on rank 0 alone, and a line on every other rank that raises the same error in the same place. A
    `UserError` is printed on rank 0 alone."""
    told = isinstance(error, UserError) and error.shared
    if world.size == 1 or told or isinstance(error, (SystemExit, KeyboardInterrupt)):
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
