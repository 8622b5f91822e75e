"""Who is missing? When a collective fails or times out, names the ranks that did not arrive, and each one's last step.

Every rank notes its step in the store about once a second. A rank whose collective failed reports itself there and
looks who else reports within a few seconds: the ones that do not are gone, stopped or stuck.

gloo raises in the thread that waits. NCCL does not: that thread waits for the GPU, and torch's watchdog aborts the process.
`naming_the_missing` has the sentence said before that.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from training.contract import EXIT_FAILED
from training.parallel.world import World

REPORT_SECONDS = 5.0
_OF_A_COLLECTIVE = re.compile(
    r"gloo|nccl|c10d|timed out|pair closure|connection (closed|reset|refused)|broken pipe|socket", re.I
)
"""gloo says "Application timeout caused pair closure" where another collective of this rank has timed out before."""


class Heartbeat:
    """Writes this rank's step to the store, at most once a second."""

    def __init__(self, world: World, now: Callable[[], float] = time.monotonic) -> None:
        self._key, self._now, self._last = f"lockstep/step/{world.rank}", now, -1.0
        self._store = _get_default_store() if world.size > 1 else None

    def beat(self, step: int) -> None:
        if self._store is not None and self._now() - self._last >= 1.0:
            self._last = self._now()
            self._store.set(self._key, str(step))


def is_collective(error: BaseException) -> bool:
    """Whether an error comes from a collective or the store, not from this rank's own work."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_A_COLLECTIVE.search(str(error)))


def describe_failed_collective(world: World, step: int, error: BaseException) -> str:
    """A sentence for an error that struck in a collective: which ranks did not report, and where they were last seen."""
    cause = (str(error) or type(error).__name__).splitlines()[0][:200]
    try:
        missing = _missing(world, step)
    except (RuntimeError, ValueError):  # torch's DistError and DistStoreError among them
        return f"step {step}: lost rank 0, which holds the store, or the network to it ({cause})"
    if missing:
        return f"step {step}: {'; '.join(missing)} ({cause})"
    return f"step {step}: a collective failed, although every rank is present ({cause})"


@contextlib.contextmanager
def naming_the_missing(
    world: World, step: Callable[[], int], timeout: float, say: Callable[[str], None]
) -> Iterator[None]:
    """While it is entered, a collective of NCCL that fails or times out is told in a sentence; then the process ends with 1.

    Where torch has no hook for it (2.15 has one), a thread says the sentence shortly before torch's watchdog aborts the
    process. It cannot see the collectives, only that this rank took no step, so it leaves the end to the watchdog.

    Args:
        step: how far this rank is.
        timeout: of collectives, in seconds.
        say: gets the sentence, in another thread than this one.
    """
    if world.size == 1 or world.device.type != "cuda":
        yield
        return
    telling, left = threading.Lock(), threading.Event()

    def tell() -> bool:
        with telling:
            if not left.is_set():
                say(describe_failed_collective(world, step(), RuntimeError("a collective of NCCL failed or timed out")))
            return not left.is_set()

    def end() -> None:
        if tell():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
            os._exit(EXIT_FAILED)  # the thread that waits for the GPU cannot be raised in

    backend = dist.distributed_c10d._get_default_group()._get_backend(world.device)
    hooked = bool(getattr(backend, "supports_abort_hooks", False))
    if hooked:
        backend.register_abort_hook(id(left), end)
    else:
        threading.Thread(target=_watch, args=(step, timeout, tell, left), name="hang", daemon=True).start()
    try:
        yield
    finally:
        with telling:  # whoever tells already ends the process
            left.set()
        if hooked:
            backend.unregister_abort_hook(id(left))


def _watch(step: Callable[[], int], timeout: float, tell: Callable[[], bool], left: threading.Event) -> None:
    """Tells, once, when no step has been taken for nine tenths of the timeout."""
    seen, since = step(), time.monotonic()
    while not left.wait(min(1.0, timeout / 20)):
        if step() != seen:
            seen, since = step(), time.monotonic()
        elif time.monotonic() - since > 0.9 * timeout:
            tell()
            return


def _missing(world: World, step: int) -> list[str]:
    """The ranks that did not report a failed collective within a few seconds."""
    store = _get_default_store()
    store.set(f"lockstep/failed/{world.rank}", str(step))
    missing = []
    deadline = time.monotonic() + REPORT_SECONDS
    for rank in range(world.size):
        left = max(deadline - time.monotonic(), 0.05)
        try:
            store.wait([f"lockstep/failed/{rank}"], timedelta(seconds=left))
        except (RuntimeError, ValueError):
            seen = f"lockstep/step/{rank}"
            last = f"last seen at step {store.get(seen).decode()}" if store.check([seen]) else "no step recorded"
            missing.append(f"rank {rank} did not arrive ({last})")
    return missing
