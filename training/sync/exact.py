"""The strategy `exact`: the gradient has the same bits at any number of ranks.

Each global batch is cut into parts (`data/order.py`), whose number and sizes do not depend on the ranks. A rank computes the parts of its
contiguous range one by one, each from the same weights, batch statistics and generators (`run/logical_workers.py`). It takes each
part's gradient out of `.grad`. A fixed binary tree (`tree.py`) adds up the parts, in float32, or float64 if the weights are. A rank adds
up its whole nodes. For the other nodes each rank adds up one chunk of all parameters: the ranks exchange chunks all to all, and then
gather the sums. If the ranks divide the parts evenly by a power of two, the bytes are those of a ring's all-reduce.

The idea of logical workers is that of M. Li et al., "EasyScale: Elastic Training with Consistent Accuracy and Improved Utilization on
GPUs" (SC 2023). The tree makes the sum independent of which rank holds which part, in memory that grows with its depth alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from ..config import Positive, Sync, settings
from ..data import order
from ..parallel.world import World
from .base import GradientSync, broadcast_module, capturing, is_compiled, nbytes, placed, trainable
from .tree import Node, Tree, whole_nodes


@functools.lru_cache(maxsize=64)  # of the few sizes of a run's batches; every sum of a step asks for it
def nodes_of_ranks(parts: int, size: int) -> tuple[tuple[Node, ...], ...]:
    """Returns, for each of `size` ranks, the nodes of the tree over `parts` parts that the rank sends."""
    ranges = (order.bounds(parts, rank, size) for rank in range(size))
    return tuple(tuple(whole_nodes(parts, *bounds)) for bounds in ranges)


class TreeSum:
    """The sum of a vector over the parts of a batch, from the parts that each rank has.

    Args:
        length: elements of the vector.
    """

    def __init__(self, length: int, dtype: torch.dtype, world: World) -> None:
        self.length, self.world = length, world
        self._size = 0
        """Number of ranks in the sum under way."""
        self._chunk = 0
        self._dtype = dtype
        self._free: list[torch.Tensor] = []
        self._tree: Tree[torch.Tensor] | None = None
        self.bytes_sent = 0

    def begin(self, parts: int) -> None:
        """Begins a new sum over this number of parts."""
        if self._size != self.world.size:
            self._size, self._chunk, self._free = self.world.size, -(-self.length // self.world.size), []
        self._tree = Tree(parts, self._add)

    def release(self) -> None:
        """Releases the memory of the last sum for reuse."""
        if self._tree is not None:
            if self._size == self.world.size:
                self._free += [value for _, value in self._tree.nodes]
            self._tree = None

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left.add_(right)
        self._free.append(right)
        return left

    def leaf(self) -> torch.Tensor:
        """Returns zeros [length, padded to a multiple of the ranks] for the vector of the next part."""
        if self._free:
            return self._free.pop().zero_()
        return torch.zeros(self._chunk * self._size, dtype=self._dtype, device=self.world.device)

    def add(self, part: int, leaf: torch.Tensor) -> None:
        """Adds the vector of a part, and keeps its memory. The caller must add the parts of a rank in order."""
        assert self._tree is not None
        self._tree.push((0, part), leaf)

    def finish(self) -> torch.Tensor:
        """Returns the sum [length, padded to a multiple of the ranks], valid until `release`. Collective."""
        tree, world = self._tree, self.world
        assert tree is not None
        if world.size == 1:
            return tree.root
        nodes = nodes_of_ranks(tree.leaves, world.size)
        mine = [value for _, value in tree.nodes]
        received = torch.empty(sum(map(len, nodes)) * self._chunk, dtype=self._dtype, device=world.device)
        if len(mine) == 1:
            (sent,) = mine
        else:  # chunk after chunk, the nodes of each
            chunks = [value.view(world.size, -1) for value in mine]
            sent = torch.stack(chunks, 1).flatten() if chunks else received.new_empty(0)
        counts = [len(of_rank) * self._chunk for of_rank in nodes]
        dist.all_to_all_single(received, sent, counts, [len(mine) * self._chunk] * world.size)
        chunk: Tree[torch.Tensor] = Tree(tree.leaves, torch.Tensor.add_)
        for node, value in zip((node for of_rank in nodes for node in of_rank), received.split(self._chunk)):
            chunk.push(node, value)
        self._free += mine
        total = self.leaf()
        dist.all_gather_into_tensor(total, chunk.root)
        self.bytes_sent += nbytes(sent) + nbytes(total)
        self._tree = Tree(1, self._add)
        self._tree.push((0, 0), total)
        return total


class Options(settings.Section):
    parts: Positive = 8
    """Parts that each global batch is cut into, whatever the number of ranks: best a multiple of the most ranks. Batch norm
    normalises each part by itself."""
    min_part: Positive = 2
    """Least samples of a part: a short batch has fewer parts."""
    mean: list[str] = Field(default_factory=list)
    """Names of buffers, besides those of batch norm, that a forward pass changes: they become the mean over the parts."""


_SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Exact(GradientSync):
    """The strategy of parts, computed one by one and summed in a fixed tree. A parameter that no part used has no gradient."""

    Options = Options
    capturable = True

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        self.batch_parts = order.Parts(self.options.parts, self.options.min_part)
        self._grouped: list[int] = []
        """The `id` of each parameter in the groups, in order."""
        self._groups: list[_Group] = []
        self._sent = 0
        """Bytes that earlier groups have sent."""

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        if is_compiled(model):
            raise self.refuse("takes no compiled model", "a compiler may choose other kernels at another start")
        if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            raise self.refuse("takes no SyncBatchNorm", "each part normalises its own samples: use nn.BatchNorm")
        self.model, self.world = model, world
        broadcast_module(model)
        self._group()
        return model

    def _group(self) -> None:
        """Groups the parameters that train now: a script may freeze and unfreeze parameters between two steps."""
        params = trainable(self.model)
        if [*map(id, params)] == self._grouped:
            return
        self._grouped = [*map(id, params)]
        self._sent = self.bytes_sent
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in params:
            by_type.setdefault(_SUMMED_AS.get(parameter.dtype, parameter.dtype), []).append(parameter)
        self._groups = [_Group(params, dtype, self.world) for dtype, params in by_type.items()]

    @property
    def sums(self) -> list[TreeSum]:
        """The sums of the step, one for each element type. Each adds up the vectors that `collect` returns of the parts."""
        return [group.sum for group in self._groups]

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return self._sent + sum(total.bytes_sent for total in self.sums)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # nothing is sent before `synchronize`

    def zero_grad(self) -> None:
        super().zero_grad()
        for total in self.sums:
            total.release()

    def begin_parts(self, count: int) -> None:
        """Begins a step over this number of parts."""
        self._group()
        for total in self.sums:
            total.begin(count)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that `collect` has not taken away."""
        return any(p.grad is not None for group in self._groups for p in group.params)

    def collect(self) -> list[torch.Tensor]:
        """Moves the gradients of a part into vectors, one for each of `sums`. `.grad` is None for the next part."""
        return [group.collect() for group in self._groups]

    def synchronize(self) -> None:
        self.begin_parts(self.world.size)  # for a loop that cuts nothing: each rank has one part
        for total, leaf in zip(self.sums, self.collect()):
            total.add(self.world.rank, leaf)
        self.apply(iter([total.finish() for total in self.sums]))

    def apply(self, sums: Iterator[torch.Tensor]) -> None:
        """Sets the gradients from the totals of `sums`, which any rank may have computed.

        It takes one tensor per group from the iterator, and may change them. In a recording it sets the gradients of the same parameters
        as in the last step whose sums the host has read.
        """
        for group in self._groups:
            group.apply(next(sums))


class _Group:
    """Parameters whose gradients are summed in one type: a vector of their gradients, and for each the number of parts that used it."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, world: World) -> None:
        self.params, self._count = params, sum(p.numel() for p in params)
        self.sum = TreeSum(self._count + len(params), dtype, world)
        self._used = [1.0] * len(params)
        """For each parameter the number of parts that used it, in the last step whose sums the host has read."""

    def _places(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns the place of each gradient in the vector, laid out as its parameter."""
        pieces = vector[: self._count].split([p.numel() for p in self.params])
        return [placed(piece, p) for p, piece in zip(self.params, pieces)]

    @torch.no_grad()
    def collect(self) -> torch.Tensor:
        """Moves the gradients of a part to a leaf, which it returns. Zeros replace a missing gradient."""
        leaf = self.sum.leaf()
        # A sum over parts that name different rows is no longer sparse.
        places = zip(self.params, self._places(leaf))
        given = [
            (place, p.grad.to_dense() if p.grad.is_sparse else p.grad) for p, place in places if p.grad is not None
        ]
        if given:
            torch._foreach_copy_([place for place, _ in given], [gradient for _, gradient in given])
        used = leaf[self._count : self.sum.length].fill_(1.0)
        for number, parameter in enumerate(self.params):
            if parameter.grad is None:
                used[number].zero_()
            parameter.grad = None
        return leaf

    @torch.no_grad()
    def apply(self, total: torch.Tensor) -> None:
        if not capturing(total):
            self._used = total[self._count : self.sum.length].tolist()
        for parameter, place, parts in zip(self.params, self._places(total), self._used):
            parameter.grad = place.to(parameter.dtype) if parts else None
