"""Model parallel with data parallel: every form equals one process, or the command fails."""

from __future__ import annotations

import pytest
import torch

from lockstep.training.exercises import toy
from lockstep.training.parallel.world import World
from tests.ranks import gang, on_ranks, training


def test_the_toy_prints_the_modules_lines_and_equals_one_process() -> None:
    done = gang(4, "toy")
    assert done.code == 0, done.output
    for rank in range(4):
        assert done.output.count(f"Running basic DDP example on rank {rank}.") == 1
        assert done.output.count(f"Running DDP with model parallel example on rank {rank}.") == 1
    assert "both halves on one cpu device" in done.output
    assert "MLP over a mesh of 2 (data) × 2 (tensor): differs from one process by at most" in done.output


def _without_the_sum(world: World) -> tuple[float, float]:
    """The mesh as it is, and with gradients that are not averaged over the data dimension."""
    whole = toy.mesh(world, 1)
    toy.dist = _Deaf  # type: ignore[attr-defined]
    return whole, toy.mesh(world, 1)


class _Deaf:
    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: object = None) -> None:
        tensor *= 2


def test_the_comparison_sees_a_gradient_that_was_not_summed() -> None:
    for whole, broken in on_ranks(_without_the_sum, 2):
        assert whole < toy.TOLERANCE < 1e-4 < broken


@pytest.mark.parametrize("tensor", ["2", "0"])
def test_a_mesh_that_does_not_divide(tensor: str) -> None:
    done = training("toy", "--tensor", tensor)
    assert done.code == 2 and ("must divide 1 ranks" if tensor == "2" else "from 1, got '0'") in done.output, (
        done.output
    )
