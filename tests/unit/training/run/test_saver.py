"""When a run saves, and what a disk that hangs or refuses costs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.training.run.saver import Saver
from tests import product


def _context(every: str = "0", folder: Path | None = None, tell: Callable[..., object] = print, **values: Any) -> Any:
    """What a `Saver` reads of a run."""
    config = product.recipe("smoke", f"every_seconds={every}")
    config.preempt.grace_seconds = 0.3
    return SimpleNamespace(**{
        "config": config, "run": SimpleNamespace(checkpoints=folder) if folder else None, "steps_done": 3, "attempt": 1,
        "state": SimpleNamespace(history={"preemptions": 1}, clock=SimpleNamespace(trained=0.0)), "metrics": product.metrics(),
        "world": SimpleNamespace(leader=True), "console": SimpleNamespace(line=tell, warn=tell),
        "event": lambda kind, **more: tell(kind, more), **values,
    })  # fmt: skip


@pytest.mark.promise("save-interval")
def test_only_the_leader_asks_and_at_the_interval() -> None:
    clock = [100.0]
    saver = Saver(_context("auto"), now=lambda: clock[0])
    other = Saver(_context("auto", world=SimpleNamespace(leader=False)), now=lambda: clock[0])
    least = saver.interval.seconds(0.0)
    for wait, due in ((least - 0.1, False), (least + 0.1, True)):
        clock[0] = 100.0 + wait
        assert saver.due_by_time() == due and not other.due_by_time()  # the ranks agree on the leader's wish
    saver.interval.stalled(1.0)
    saver.interval.written(0.5)
    assert not saver.due_by_time()
    clock[0] = 100.0 + saver.interval.seconds(0.0) + 0.1
    assert saver.due_by_time()


def test_starts_that_followed_neither_an_end_nor_a_save_are_failures() -> None:
    assert Saver(_context("auto")).interval.failures == 0
    assert Saver(_context("auto", attempt=5)).interval.failures == 3  # one of the four starts before was preempted


@pytest.mark.promise("full-disk")
def test_a_disk_that_hangs_holds_up_the_end_no_longer_than_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, told, asked = threading.Event(), [], []
    saver = Saver(
        _context(folder=tmp_path, tell=lambda *words: told.append(words)), lambda: asked[0] if asked else None
    )
    assert saver._writer is not None
    monkeypatch.setattr(type(saver._writer), "_write", lambda *_: answer.wait(60))
    saver._future = saver._writer.save(3, {"a": torch.ones(2)})
    try:
        threading.Timer(0.5, lambda: asked.append(time.monotonic())).start()
        began = time.monotonic()
        saver._reap()
        saver.close()
        assert time.monotonic() - began < 5, "a signal that comes while it waits starts the grace"
        assert told[0][0] == "checkpoint_failed" and not answer.is_set() and saver._future is None, (
            "it waited for the disk"
        )
    finally:
        answer.set()


@pytest.mark.promise("full-disk")
def test_a_disk_that_answers_with_its_own_timeout_costs_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a network disk raises (ETIMEDOUT) has the name of a wait that is over: it is neither waited for nor a hang."""

    def refused(*_: object) -> None:
        raise TimeoutError(110, "Connection timed out")

    told: list[Any] = []
    saver = Saver(_context(folder=tmp_path, tell=lambda *words: told.append(words)))
    assert saver._writer is not None
    monkeypatch.setattr(type(saver._writer), "_write", refused)
    for step in (3, 4):
        saver._future = saver._writer.save(step, {"a": torch.ones(2)})
        saver._reap()
        assert saver._last_failed and not saver._hangs, "the next one is tried"
    assert [
        more["failures"] for kind, more in (words for words in told if len(words) == 2) if kind == "checkpoint_failed"
    ] == [1, 2]
    assert sum("Connection timed out" in str(words) for words in told if len(words) == 1) == 2
    saver.close()
