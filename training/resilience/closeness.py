"""Checks that all ranks hold the same model: `check_parameter_closeness` compares every rank with rank 0.

    from lockstep.training.resilience.closeness import check_parameter_closeness
    check_parameter_closeness(model)            # in a script of your own, after any step; every rank calls it
    lockstep run … --set check_closeness=100   # in any run

Replicas that start equal and apply the same gradients stay equal to the bit, under every strategy. A difference shows a gradient
that was not summed, a seed that differs, or bad memory – long before the loss shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..contract import named
from ..parallel.exchange import all_gather_trees, group_size
from ..parallel.names import plain_name
from ..parallel.packing import tensor_bytes
from ..parallel.world import World

BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of batch norm, ours and torch's. Without SyncBatchNorm they differ between ranks, except under `exact`."""

EACH_ALONE = (
    "A rank has changed its weights alone: in your own loop call the network that replicate() returned, and make every other change "
    "of weights on all ranks alike"
)
SAME_NUMBER = (
    "A schedule that takes a metric, such as ReduceLROnPlateau, needs the same value on all ranks: combine the ranks' measurements "
    "with run.sum()"
)
MOVED_APART = (
    "differs between the ranks, because each rank updates it from its own samples. Statistics may differ: an evaluation takes their "
    "mean. A buffer that the loss reads, such as a codebook, must not: combine its updates with torch.distributed.all_reduce"
)
SAME_BUFFERS = "Change a buffer on all ranks alike. Update it from a rank's own samples only before the step of that batch, or inside it"
SAME_MODE = "Before each step call train(), eval() and requires_grad_() on all ranks alike"


class ReplicasDiffer(RuntimeError):
    """An error for ranks that differ in parameters, buffers, learning rates or modes. The message names the first difference and the
    ranks."""


@torch.no_grad()
def check_parameter_closeness(
    model: nn.Module, *, rtol: float = 0.0, atol: float = 0.0, batch_statistics: bool = True
) -> bool:
    """Compares every rank's parameters and buffers with rank 0's. Collective; all ranks raise, or none does.

    Returns True, so that the call may stand in an `assert`.

    A wrapped model (DDP, FSDP) is allowed. A sharded parameter has no copy on other ranks and is left out.

    Args:
        rtol: relative tolerance, as `torch.isclose`. Replicas are equal to the bit, so the default is 0.
        atol: absolute tolerance.
        batch_statistics: compare batch norm's running statistics too. They differ between ranks unless they are synchronised.

    Raises:
        ReplicasDiffer: naming the first parameter or buffer that differs, on which ranks, and by how much.
        UserError: the launcher started several ranks, but there is no process group.
    """
    if group_size() == 1:
        return True
    tensors = list(_tensors(model, batch_statistics))
    device = next((tensor.device for _, tensor in tensors), torch.device("cpu"))
    text = repr([(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors])
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # exact in a float64
    if other := _unlike_rank_0(torch.tensor([digest], dtype=torch.float64, device=device)):
        # The broadcasts below would not match.
        raise ReplicasDiffer(
            f"rank {', '.join(map(str, other))} has parameters or buffers of other names, shapes or dtypes than rank 0"
        )
    # (index of the first tensor that differs, largest difference, number of elements)
    difference = torch.tensor([-1.0, 0.0, 0.0], dtype=torch.float64)
    for index, (_, tensor) in enumerate(tensors):
        reference = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(reference, 0)
        if difference[0] < 0:
            same = torch.isclose(tensor, reference, rtol=rtol, atol=atol, equal_nan=True)
            if not bool(same.all()):
                distances = (tensor.double() - reference.double()).abs()[~same]
                difference = torch.tensor([index, distances.max().item(), len(distances)], dtype=torch.float64)
    of_rank = _unlike_rank_0(difference.to(device))
    if not of_rank:
        return True
    first = min(int(index) for index, _, _ in of_rank.values())
    name, tensor = tensors[first]
    of_first = {rank: (size, int(count)) for rank, (index, size, count) in of_rank.items() if index == first}
    size, count = max(of_first.values())
    raise ReplicasDiffer(
        f"{name} on rank {', '.join(map(str, of_first))} differs from rank 0's: by up to {size:.3g} "
        f"in {count} of {tensor.numel()} elements (allowed: {rtol:g} relative, {atol:g} absolute)"
    )


@torch.no_grad()
def fingerprint(*modules: nn.Module) -> int:
    """Returns a hash of the bits of all parameters, a whole number below 2**56. No collective; waits for the device once."""
    sums = sums_of_bits(parameter for module in modules for parameter in module.parameters()).tolist()
    return int.from_bytes(hashlib.sha256(repr(sums).encode()).digest()[:7], "big")


@torch.no_grad()
def sums_of_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of each tensor's bits as whole numbers [n], int64, on the device of the first."""
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
        total = values.contiguous().view(_OF_SIZE[values.element_size()]).sum(dtype=torch.int64)
        sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def differing_ranks(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Returns name → ranks whose value differs from rank 0's, or is missing. Only names that rank 0 has.

    Args:
        of_ranks: the values of each rank by their names.
    """
    ranks = {
        name: [rank for rank, values in enumerate(of_ranks) if values.get(name) != first]
        for name, first in of_ranks[0].items()
    }
    return {name: others for name, others in ranks.items() if others}


def check_same(values: Mapping[str, Any], world: World) -> None:
    """Raises `ReplicasDiffer` on all ranks if a value differs between ranks, with the value of each. Collective."""
    of_ranks = all_gather_trees(dict(values), world)
    for name in differing_ranks(of_ranks):
        of_value: dict[Any, list[int]] = {}
        for rank, of_rank in enumerate(of_ranks):
            of_value.setdefault(of_rank.get(name), []).append(rank)
        values_of_ranks = ", ".join(f"{value} on rank {named(ranks)}" for value, ranks in of_value.items())
        raise ReplicasDiffer(f"{name} has {values_of_ranks}")


@torch.no_grad()
def sha256(model: nn.Module) -> str:
    """Returns the hash of names, shapes and bytes of the parameters and buffers that this rank holds. No collective."""
    digest = hashlib.sha256()
    for name, tensor in _tensors(model, batch_statistics=True):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()


_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element in bytes → whole numbers of this size."""


def _tensors(model: nn.Module, batch_statistics: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not batch_statistics and name.rsplit(".", 1)[-1] in BATCH_STATISTICS:
            continue
        # Only a DTensor has it; to import DTensor takes most of a second.
        placements = getattr(tensor, "placements", ())
        if not any(placement.is_shard() for placement in placements):
            yield plain_name(model, name), tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _unlike_rank_0(values: torch.Tensor) -> dict[int, list[float]]:
    """Returns rank → values [n], of ranks whose first value differs from rank 0's. Gathers values only if a rank differs. Collective."""
    both = torch.stack([values[0], -values[0]])
    # Maximum and negative minimum: they match only if all ranks have the same value.
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both[0] == -both[1]:
        return {}
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return {rank: row.tolist() for rank, row in enumerate(gathered) if row[0] != gathered[0][0]}
