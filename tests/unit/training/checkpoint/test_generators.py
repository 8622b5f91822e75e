"""The states of generators in a checkpoint: what would not go back is refused where it is read."""

from __future__ import annotations

import pytest
import torch

from lockstep.training.checkpoint import generators

CPU = torch.device("cpu")
OF_A_GPU = torch.tensor([-3, 8]).view(torch.uint8)
"""Seed and offset."""


@pytest.mark.parametrize(
    "state",
    [OF_A_GPU[:8], torch.zeros(17, dtype=torch.uint8), OF_A_GPU.view(2, 8), torch.tensor([1, 4]), torch.tensor([1, 6]).view(torch.uint8),
     [1, 4], None],
    ids=["short", "long", "two-dimensional", "int64", "between two draws", "a list", "nothing"],
)  # fmt: skip
def test_a_state_that_no_gpu_takes_is_not_sound(state: object) -> None:
    states = generators.capture(CPU)
    assert generators.is_sound({**states, "cuda": OF_A_GPU}) and not generators.is_sound({**states, "cuda": state})
