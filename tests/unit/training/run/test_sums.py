from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.training.run.step_input import CurrentBatch, StepSums

BATCHES = {
    "parts of one batch": ([("a", "xs"), ("a", "ys"), ("a", "xs")], 12),
    "two networks": ([("a", "xs"), ("b", "xs")], 4),
    "two networks, each with its own": ([("a", "xs"), ("b", "ys")], 4),
    "a network that learns twice": ([("a", "xs"), ("a", "xs"), ("b", "xs")], 4),
}
"""Who steps on which whole, one after another; samples of all ranks that are counted."""


@pytest.mark.parametrize("name", BATCHES)
def test_the_samples_of_a_batch_count_once_and_those_of_another_whole_again(name: str) -> None:
    world: Any = SimpleNamespace(size=2, rank=1, live=None, generation=0)
    run: Any = SimpleNamespace(state=SimpleNamespace(losses=torch.zeros(2)), world=world)
    sums, current = StepSums(run, SimpleNamespace()), CurrentBatch(world, None)  # type: ignore[arg-type]
    wholes, optimizers = {"xs": torch.zeros(4), "ys": torch.zeros(4)}, {"a": object(), "b": object()}
    steps, samples = BATCHES[name]
    current.begin(None, iter(()))
    sums.begin_batch()
    counted = [0, 0]
    for optimizer, whole in steps:
        mine, part = current.part(wholes[whole])
        new = sums.new_samples([optimizers[optimizer]], len(mine), part.total, current.wholes)  # type: ignore[list-item]
        counted = [before + more for before, more in zip(counted, new)]
    assert counted == [samples // 2, samples]
