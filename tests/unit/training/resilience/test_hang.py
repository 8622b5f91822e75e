"""The thread that stands in for a hook of NCCL's: it tells of a rank that others wait for, and not of an evaluation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lockstep.training.parallel.world import World
from lockstep.training.resilience import hang

TIMEOUT = 0.5


def _watched(progress: Callable[[], int], tell: Callable[[int], bool], seconds: float = 3 * TIMEOUT) -> None:
    """The thread, for so long or until it ends by itself."""
    left = threading.Event()
    watch = threading.Thread(target=hang._watch, args=(lambda: (7, progress()), TIMEOUT, tell, left))
    watch.start()
    watch.join(seconds)
    left.set()
    watch.join()


def test_a_rank_that_gets_no_further_is_told_of_once_and_in_time() -> None:
    asked: list[float] = []
    began = time.monotonic()
    _watched(lambda: 0, lambda still: asked.append(time.monotonic() - began) or True)
    assert len(asked) == 1 and asked[0] > 0.85 * TIMEOUT


def test_the_batches_of_an_evaluation_are_progress() -> None:
    asked: list[int] = []
    _watched(lambda: int(time.monotonic() * 10), lambda still: asked.append(still) or True)
    assert asked == []


@pytest.mark.parametrize("other", ["evaluates as long", "evaluated before", "is gone"])
def test_all_ranks_in_one_evaluation_are_no_hang(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(hang, "_get_default_store", lambda: store)
    monkeypatch.setattr(hang, "REPORT_SECONDS", 0.2)
    if other != "is gone":
        store.set(f"lockstep/still/7/{1 if other == 'evaluates as long' else 0}/1", "7")
    told = hang._about_the_missing(World(rank=0, size=2), 7, "still/7/1", "nothing came")
    assert told == (
        "" if other == "evaluates as long" else "step 7: rank 1 did not arrive (no step recorded) (nothing came)"
    )
