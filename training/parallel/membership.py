"""The place of a process among the ranks, which a loss may change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import process


@dataclass(kw_only=True, eq=False)
class Membership:
    """The place of this process among the ranks. It may change: `Live` writes it.

    `rank` counts over all nodes, `local_rank` within `node`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    master: tuple[str, int] | None = None
    """Where rank 0 serves the store."""
    launcher: str = "none"
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    nccl: bool = False
    """Collectives over tensors on GPUs are NCCL's; False: all are gloo's."""
    generation: int = 0
    """How often ranks were lost or admitted, and the others have gone on."""
    number: int = -1
    """The rank that this process was started as, which the launcher and the metrics know it by."""
    replacement: int = 0
    """Of a process in the place of a lost rank, its number among these, from 1, until it takes part; 0: it does. Until then it is alone."""
    peers: process.Connections = dataclasses.field(default_factory=dict)
    """gloo's to the other ranks, as the group was opened. Where a collective has failed on this rank they are shut, so that it fails on all
    at once, whatever they wait for. None beside NCCL's, which cannot be told from them;
    under `launch --live` NCCL's are among them, as it is aborted before."""

    def __post_init__(self) -> None:
        if self.number < 0:
            self.number = self.rank

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks. Asked of torch each time: held here, it would outlive its end."""
        return dist.distributed_c10d._get_default_group()


def backends(nccl: bool) -> str:
    """Of a process group: gloo for tensors on the CPU, and for those on GPUs unless `nccl`."""
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"
