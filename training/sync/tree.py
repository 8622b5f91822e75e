"""A sum whose bits do not depend on which rank computes it: a fixed binary tree over numbered leaves.

Floating-point addition is not associative, so a sum is a function of its brackets. Here they follow from the number of leaves alone.
Node (level, index) is the sum of the leaves from index · 2^level on, 2^level of them, or as many as there are:

    5 leaves    ((0 + 1) + (2 + 3)) + 4.

A rank with consecutive leaves adds up the whole nodes among them. It sends the remaining nodes, from left to right, to the rank that adds
the rest. The same class does both. No torch: it is tested with brackets in place of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
"""(level, index)."""


class Tree(Generic[T]):
    """What is known of the sum so far. Nodes come from left to right, without a gap.

    Args:
        leaves: of the whole sum.
        add: the sum of its two arguments; it may reuse them.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self.leaves, self._add = leaves, add
        self.nodes: list[tuple[Node, T]] = []
        """The largest whole nodes of what has come, from left to right: at most one a level but at the first leaves' side."""

    def push(self, node: Node, value: T) -> None:
        """Raises `ValueError` for a node that does not follow on the last one."""
        if self.nodes and node[1] << node[0] != self._end(self.nodes[-1][0]):
            raise ValueError(f"node {node} does not follow on {self.nodes[-1][0]}")
        level, index = node
        while 1 << level < self.leaves:  # else it is the root
            if index % 2 and self.nodes and self.nodes[-1][0] == (level, index - 1):
                value = self._add(self.nodes.pop()[1], value)
            elif index % 2 or (index + 1) << level < self.leaves:
                break  # its sibling is another rank's, or is still to come
            level, index = level + 1, index // 2
        self.nodes.append(((level, index), value))

    def _end(self, node: Node) -> int:
        return min((node[1] + 1) << node[0], self.leaves)

    @property
    def root(self) -> T:
        """The whole sum. Raises `ValueError` where leaves are missing."""
        if len(self.nodes) != 1 or 1 << self.nodes[0][0][0] < self.leaves:
            raise ValueError(f"of {self.leaves} leaves only {[node for node, _ in self.nodes]} have come")
        return self.nodes[0][1]


def whole_nodes(leaves: int, low: int, high: int) -> list[Node]:
    """Returns the nodes that the rank with leaves `low` to `high` sends."""
    tree: Tree[None] = Tree(leaves, lambda *_: None)
    for leaf in range(low, high):
        tree.push((0, leaf), None)
    return [node for node, _ in tree.nodes]
