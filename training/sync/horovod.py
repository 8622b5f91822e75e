"""Horovod's interface: `import lockstep.training.sync.horovod as hvd`. An interface over the engine of `buckets.py`.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Started by mpiexec, torchrun, srun or `training launch`; alone it is one rank. What we do not have (other process sets,
Adasum, fp16 compression) is refused, not ignored. Beyond Horovod: `init` returns (rank, device), `broadcast_parameters`
takes a module, and `partition_dataset` shares out a data set.

A. Sergeev, M. Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (2018).
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from lockstep.training.data.partition import PartitionedLoader
from lockstep.training.parallel import world as worlds
from lockstep.training.parallel.exchange import all_gather_rows, broadcast_tree
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import broadcast_tensors, load_optimizer
from lockstep.training.sync.horovod_optimizer import distribute

__all__ = [
    "Average", "Compression", "DistributedOptimizer", "Max", "Min", "Op", "Product", "Sum", "allgather", "allreduce", "broadcast",
    "broadcast_optimizer_state", "broadcast_parameters", "init", "is_initialized", "local_rank", "local_size",
    "partition_dataset", "rank", "shutdown", "size",
]  # fmt: skip


class Op(enum.Enum):
    """How `allreduce` combines the ranks' values; each is also a name of the module (`hvd.Sum`)."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product
_REDUCE = {
    Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}  # fmt: skip


class Compression:
    """Only `none`: `sync.name=bf16_compress` halves the bytes without float16's overflow."""

    none = None


_joined = contextlib.ExitStack()
_world: World | None = None


def init(comm: Any = None, process_sets: Any = None) -> tuple[int, torch.device]:
    """Joins the ranks of this launch, once; returns this rank and its device.

    Raises:
        lockstep.training.contract.UserError: the launcher's variables contradict each other, or there are too few GPUs.
        ValueError: the script's own process group takes no CPU tensors.
    """
    global _world
    if comm is not None or process_sets is not None:
        raise ValueError("only groups of all ranks are supported: leave out comm and process_sets")
    if _world is None and dist.is_initialized():  # by the script itself
        if torch.device("cpu") not in dist.distributed_c10d._get_default_group()._device_types:
            raise ValueError(
                f"the process group has no backend for CPU tensors ({dist.get_backend_config()}), which sizes and plain "
                "values travel as: call dist.init_process_group('cpu:gloo,cuda:nccl'), or leave it to hvd.init()"
            )
        me = worlds.detect(os.environ)
        _world = worlds.placed(me, worlds.choose_device(me, "auto"))
    elif _world is None:
        _world = _joined.enter_context(worlds.joined())
        atexit.register(shutdown)
    return _world.rank, _world.device


def adopt(world: World) -> None:
    """`init` where the training loop has joined already, and leaves by itself."""
    global _world
    _world = world


def shutdown() -> None:
    """Leaves the group; `init` may join again. Also done at the end of the process."""
    global _world
    _world = None
    _joined.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _world is not None


def _me() -> World:
    if _world is None:
        raise ValueError("call hvd.init() first")
    return _world


def rank() -> int:
    """This process's rank. As the next three, raises `ValueError` before `init`."""
    return _me().rank


def size() -> int:
    """How many ranks there are."""
    return _me().size


def local_rank() -> int:
    """This process's rank within its node."""
    return _me().local_rank


def local_size() -> int:
    """How many ranks this node has."""
    return _me().local_size


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,  # noqa: ARG001
    op: Op | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """The mean (or what `op` says) over the ranks, as a new tensor. Differentiable for Average and Sum."""
    _refuse_compression(compression)
    if average is not None and op is not None:
        raise ValueError("give average or op, not both")
    op = op or (Sum if average is False else Average)
    _me()
    return _AllReduce.apply(tensor, op, prescale_factor, postscale_factor)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:  # noqa: ARG001
    """The tensors of all ranks one after another along the first dimension, in which they may differ. Differentiable."""
    _me()
    return _AllGather.apply(tensor)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:  # noqa: ARG001
    """Rank `root_rank`'s tensor, as a new tensor. Differentiable."""
    _me()
    return _Broadcast.apply(tensor, root_rank)


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Sends rank `root_rank`'s tensors to all, in place: a `state_dict`, a list of (name, tensor), or a whole module."""
    _me()
    if isinstance(params, nn.Module):
        tensors = [*params.parameters(), *params.buffers()]
    elif isinstance(params, dict):
        tensors = [params[name] for name in sorted(params)]
    elif isinstance(params, list) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in params):
        tensors = [tensor for _, tensor in params]
    else:
        raise ValueError(f"params must be a dict, a list of (name, tensor) or a module, got {type(params).__name__}")
    broadcast_tensors([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)], root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, model: Any = None) -> None:  # noqa: ARG001
    """Sends rank `root_rank`'s optimizer state, hyperparameters included, to all."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")  # noqa: TRY004 - as Horovod
    me = _me()
    state = broadcast_tree(optimizer.state_dict() if me.rank == root_rank else None, me, root_rank)
    if me.rank != root_rank:
        load_optimizer(optimizer, state)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: Any = Compression.none, backward_passes_per_step: int = 1, op: Op = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Any = None, sparse_as_dense: bool = False,
) -> torch.optim.Optimizer:  # fmt: skip
    """`optimizer` with gradients that are reduced over the ranks from inside `backward`; `step` waits for them.

    With `backward_passes_per_step` gradients of several passes are added up, then sent. Its `set_samples` weights
    unequal parts exactly.

    Raises:
        ValueError: names in `named_parameters` that are not unique, parameters without a name, an option we do not have.
    """
    _refuse_compression(compression)
    if op not in (Average, Sum):
        raise ValueError(f"gradients are reduced by Average or Sum, not {op}")
    if num_groups or groups is not None or sparse_as_dense:
        raise ValueError(
            "num_groups, groups and sparse_as_dense are not supported: every parameter is sent by itself, dense"
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
    factor = 1.0 if op is Sum else gradient_predivide_factor
    twin = distribute(optimizer, named_parameters, backward_passes_per_step, factor, mean=op is Average)
    twin._reducer.weight = 1 / gradient_predivide_factor  # type: ignore[attr-defined]
    return twin


def partition_dataset(
    dataset: Dataset[Any], batch_size: int, device: torch.device | str | None = None,
    dtype: torch.dtype | str = torch.float32, seed: int = 0, shuffle: bool = True,
) -> tuple[PartitionedLoader, int]:  # fmt: skip
    """(a loader of this rank's part of each batch, the size of that part), of a data set of (input, target).

    `batch_size` is shared over the ranks; the parts differ by at most one sample where it does not divide.
    """
    me = _me()
    loader = PartitionedLoader(dataset, batch_size, me, device, dtype, seed, shuffle)
    return loader, loader.per_rank


def _refuse_compression(compression: Any) -> None:
    if compression is not None:
        raise ValueError("only Compression.none is supported; sync.name=bf16_compress and powersgd compress")


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op, before: float, after: float) -> torch.Tensor:
        ctx.op, ctx.before, ctx.after = op, before, after
        result = tensor.detach().clone() if before == 1.0 else tensor.detach() * before
        dist.all_reduce(result, _REDUCE[op])
        if op is Average:
            result = result / size() if result.is_floating_point() else result // size()
        return result if after == 1.0 else result * after

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.op not in (Average, Sum):
            raise ValueError(f"the gradient of allreduce with {ctx.op} is not defined here")
        return allreduce(grads[0], op=ctx.op, prescale_factor=ctx.before, postscale_factor=ctx.after), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach().contiguous()
        gathered = all_gather_rows(rows)
        ctx.before, ctx.count, ctx.shape = sum(map(len, gathered[: rank()])), len(rows), tensor.shape
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return allreduce(grads[0], op=Sum)[ctx.before : ctx.before + ctx.count].reshape(ctx.shape)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int) -> torch.Tensor:
        ctx.root = root
        result = tensor.detach().clone()
        dist.broadcast(result, root)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        total = allreduce(grads[0], op=Sum)
        return (total if rank() == ctx.root else torch.zeros_like(total)), None
