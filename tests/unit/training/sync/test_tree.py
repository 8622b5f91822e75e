from __future__ import annotations

import random

import pytest

from lockstep.training.data.order import bounds
from lockstep.training.sync.tree import Tree, whole_nodes


def brackets(left: str, right: str) -> str:
    return f"({left}+{right})"


def summed(leaves: int, cuts: list[int]) -> str:
    """By ranks that have the leaves between the cuts, and by one that adds up what they hand on."""
    owner: Tree[str] = Tree(leaves, brackets)
    for low, high in zip([0, *cuts], [*cuts, leaves]):
        rank: Tree[str] = Tree(leaves, brackets)
        for leaf in range(low, high):
            rank.push((0, leaf), str(leaf))
        assert [node for node, _ in rank.nodes] == whole_nodes(leaves, low, high)
        for node, value in rank.nodes:
            owner.push(node, value)
    return owner.root


@pytest.mark.promise("same-bits")
@pytest.mark.parametrize("trees", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_the_brackets_do_not_depend_on_who_has_which_leaves(trees: int) -> None:
    draw = random.Random(trees)
    for _ in range(trees):
        leaves, size = draw.randint(1, 300), draw.randint(1, 40)
        cuts = sorted(draw.randint(0, leaves) for _ in range(size - 1))
        assert summed(leaves, cuts) == summed(leaves, []), f"{leaves} leaves, cuts {cuts}"


@pytest.mark.parametrize(
    ("parts", "size", "most", "mean"), [(8, 3, 2, 5 / 3), (8, 4, 1, 1), (64, 3, 5, 11 / 3), (256, 3, 7, 5)]
)
def test_a_rank_hands_on_few_nodes(parts: int, size: int, most: int, mean: float) -> None:
    counts = [len(whole_nodes(parts, *bounds(parts, rank, size))) for rank in range(size)]
    assert max(counts) == most and sum(counts) / size == pytest.approx(mean)
