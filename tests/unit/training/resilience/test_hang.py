"""The thread that stands in for a hook of NCCL's tells of no rank that evaluates as long as the others."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.training.parallel.world import World
from lockstep.training.resilience import hang


@pytest.mark.parametrize("other", ["evaluates as long", "is gone"])
def test_all_ranks_in_one_evaluation_are_no_hang(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(hang, "_get_default_store", lambda: store)
    monkeypatch.setattr(hang, "VERDICT_SECONDS", 0.2)
    if other == "evaluates as long":
        store.set("lockstep/still/7/1/1", "7")
    told = hang._about_the_missing(World(rank=0, size=2), 7, "still/7/1", "nothing came")
    assert told == (
        "" if other == "evaluates as long" else "step 7: rank 1 did not arrive (no step recorded) (nothing came)"
    )
