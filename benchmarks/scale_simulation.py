"""One rank among 1,024: the collectives are made up here, and each notes what gloo would send for it on all ranks.

No process is started. The other ranks are thought to hold what this one holds, so that what it unpacks, compares and
puts together is as large as it would be. Rank 0 is run first; what it sends is what the other rank gets.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.scale_parts import calls
from benchmarks.scale_ranks import settings
from lockstep.training.data import shards
from lockstep.training.data.loader import Loader
from lockstep.training.data.shards import Manifest
from lockstep.training.parallel.world import World, joined
from lockstep.training.run import prepare


class Group:
    """Stands for torch's collectives over `size` ranks of gloo, as rank `rank` sees them.

    Messages, of all ranks: a ring passes each piece of a sum 2·(n − 1) times, gathering for all is n·(n − 1) pieces, a tree
    reaches n − 1 ranks, a barrier is log₂ n messages a rank.
    """

    def __init__(self, size: int, rank: int, sent: list[torch.Tensor] | None = None) -> None:
        self.size, self.rank = size, rank
        self.messages, self.bytes, self.names = 0, 0, list[str]()
        self.sent = [] if sent is None else sent

    def _note(self, name: str, messages: int, each: int) -> None:
        self.messages += messages
        self.bytes += messages * each
        self.names.append(name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:  # noqa: ARG002
        pieces = min(2 * self.size, tensor.numel())
        self._note("all_reduce", pieces * 2 * (self.size - 1), -(-tensor.nbytes // max(pieces, 1)))
        return mock.MagicMock() if async_op else None

    def all_gather(self, into: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:  # noqa: ARG002
        self._note("all_gather", self.size * (self.size - 1), tensor.nbytes)
        for each in into:
            each.copy_(tensor)

    def _from_rank_0(self, tensor: torch.Tensor) -> None:
        if self.rank == 0:
            self.sent.append(tensor.detach().clone())
        else:
            tensor.copy_(self.sent.pop(0))

    @torch.no_grad()
    def broadcast(self, tensor: torch.Tensor, src: int = 0, group: Any = None) -> None:  # noqa: ARG002
        self._note("broadcast", self.size - 1, tensor.nbytes)
        self._from_rank_0(tensor)

    def gather(self, tensor: torch.Tensor, into: list[torch.Tensor] | None = None, dst: int = 0) -> None:  # noqa: ARG002
        self._note("gather", self.size - 1, tensor.nbytes)
        for each in into or ():
            each.copy_(tensor)

    def scatter(self, tensor: torch.Tensor, pieces: list[torch.Tensor] | None = None, src: int = 0) -> None:  # noqa: ARG002
        self._note("scatter", self.size - 1, tensor.nbytes)
        if pieces:
            tensor.copy_(pieces[0])
        self._from_rank_0(tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Of a tree: rank 0 hears of half of the ranks, of a quarter, …; the first of its messages stands for all."""
        if src == 1:
            self._note("tree", self.size - 1, tensor.nbytes)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Up the tree."""

    def barrier(self) -> None:
        self._note("barrier", self.size * math.ceil(math.log2(self.size)), 0)

    @contextlib.contextmanager
    def stands_in(self) -> Iterator[Group]:
        with contextlib.ExitStack() as stack:
            for name in ("all_reduce", "all_gather", "broadcast", "gather", "scatter", "barrier", "send", "recv"):
                stack.enter_context(mock.patch.object(dist, name, getattr(self, name)))
            stack.enter_context(mock.patch.object(dist, "get_world_size", return_value=self.size))
            stack.enter_context(mock.patch.object(dist, "get_rank", return_value=self.rank))
            # What another rank sends is what this one holds: the room for it is filled before it "arrives".
            stack.enter_context(mock.patch.object(torch, "empty_like", torch.clone))
            yield self


def simulate(sizes: list[int]) -> dict[str, dict[str, Any]]:
    """Part → for each size messages and bytes of all ranks, and CPU-seconds of rank 0 and of another one."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, joined(World(), "cpu", 60) as alone:
        root = Path(folder)
        config = settings(
            root / "data", "global_batch_size=4096", "data.options={n: 8192, n_test: 512, size: 8, noise: 1.5}"
        )
        manifest = Manifest.read(shards.prepare(config.data))
        model = prepare._build_model(config, alone, manifest)
        loader = Loader(config, alone, manifest, 4096, 1)
        state, _ = prepare._replicate(model, config, alone, loader, 4096)
        for size in sizes:
            _one_size(size, state, found)
    return found


def _one_size(size: int, state: Any, found: dict[str, dict[str, Any]]) -> None:
    views = []
    for rank in (0, 1):
        world = World(rank=rank, size=size, local_rank=rank % 8, local_size=min(size, 8))
        state.world = world
        views.append(calls(world, state))
    for name in views[0]:
        sent: list[torch.Tensor] = []
        row = {}
        for rank, view in enumerate(views):
            group = Group(size, rank, sent)
            call: Callable[[], object] = view[name][0]
            state.world = World(rank=rank, size=size, local_rank=rank % 8, local_size=min(size, 8))
            with group.stands_in():
                began = time.process_time()
                call()
                row["cpu of rank 0" if rank == 0 else "cpu of another"] = round(time.process_time() - began, 6)
            if rank == 0:
                row.update(messages=group.messages, bytes=group.bytes, collectives=group.names)
        found.setdefault(name, {})[str(size)] = row
