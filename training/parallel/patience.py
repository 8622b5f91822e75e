"""A part that may take longer on some ranks than a collective may: data that one node prepares and another has already.

The others do not wait in a collective, whose time limit is for what hangs. They ask the store, where each rank that is at work
says so, and meet in a collective when all are done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lockstep.training.contract import EXIT_FAILED, UserError
from lockstep.training.parallel.agreement import raise_together
from lockstep.training.parallel.world import World

BEAT_SECONDS = 1.0


class NotHeardError(UserError):
    """Ranks that are at work have said nothing for too long: they are gone or hang."""

    code = EXIT_FAILED


@contextlib.contextmanager
def waiting_for_all(world: World, what: str, seconds: float, silent: float) -> Iterator[None]:
    """`failing_together` for a part that every rank takes once, each in its own time. Collective.

    Args:
        what: they do, for the message.
        seconds: that the others wait, and the setting that says so.
        silent: seconds without a word from those that still do it.

    Raises:
        UserError: as `raise_together`; or the others took longer.
        NotHeardError: they have said nothing.
    """
    if world.size == 1:
        yield
        return
    store = _get_default_store()
    done = threading.Event()
    threading.Thread(target=_beat, args=(store, what, done), name="patience", daemon=True).start()
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - raised again below
        error = caught
    finally:
        done.set()
        store.add(f"lockstep/{what}/done", 1)
    _wait(lambda name: store.add(f"lockstep/{what}/{name}", 0), world, what, seconds, silent)
    raise_together(error, world)


def _beat(store: dist.Store, what: str, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(RuntimeError):  # the store is gone: its rank has ended, and the launcher ends this one
            store.add(f"lockstep/{what}/beats", 1)


def _wait(count: Callable[[str], int], world: World, what: str, seconds: float, silent: float) -> None:
    began = heard = time.monotonic()
    beats, pause = -1, 0.01
    while (finished := count("done")) < world.size:
        if (now := count("beats")) != beats:
            beats, heard = now, time.monotonic()
        left = f"{world.size - finished} of {world.size} ranks"
        if time.monotonic() - began > seconds:
            raise UserError(
                f"{left} still {what} after {seconds:.0f} s: check their nodes, or wait longer with data.prepare_timeout"
            )
        if time.monotonic() - heard > silent:
            raise NotHeardError(f"{left} should {what} and have said nothing for {silent:.0f} s: check their nodes")
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
