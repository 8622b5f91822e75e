"""The states of generators in a checkpoint: what would not go back is refused where it is read."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lockstep.training.checkpoint import generators

CPU = torch.device("cpu")


def _of_a_gpu(seed: int, offset: int) -> torch.Tensor:
    return torch.tensor([seed, offset]).view(torch.uint8)


def test_every_generator_goes_on_where_it_was() -> None:
    generators.seed(5)
    states = generators.capture(CPU)
    drawn = [(random.random(), float(np.random.rand()), float(torch.rand(()))) for _ in range(2)]
    generators.restore(states, CPU)
    assert [(random.random(), float(np.random.rand()), float(torch.rand(()))) for _ in range(2)] == drawn


def test_the_state_of_a_gpu_is_looked_at_where_there_is_none() -> None:
    states = generators.capture(CPU)
    assert generators.is_sound(states) and generators.is_sound({**states, "cuda": _of_a_gpu(-3, 8)})


@pytest.mark.parametrize(
    "state",
    [
        _of_a_gpu(1, 4)[:8],
        torch.zeros(17, dtype=torch.uint8),
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.tensor([1, 4]),
        _of_a_gpu(1, 6),
        [1, 4],
        None,
    ],
    ids=["short", "long", "two-dimensional", "int64", "between two draws", "a list", "nothing"],
)
def test_a_state_that_no_gpu_takes_is_not_sound(state: object) -> None:
    assert not generators.is_sound({**generators.capture(CPU), "cuda": state})
