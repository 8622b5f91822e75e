"""Horovod's interface over Lockstep's engine of buckets, for scripts beside this file: `import horovod as hvd`.

    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

As a strategy of a run it is `sync.name=examples.modules.horovod:Horovod`.

Started by mpiexec, torchrun, srun or `training launch`; alone it is one rank. Errors have Horovod's types and meaning.

A. Sergeev, M. Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow" (2018).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, default_collate

from lockstep.training.data.order import bounds, global_ids
from lockstep.training.parallel import world as worlds
from lockstep.training.parallel.exchange import broadcast_tree
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import BuildOptimizer, broadcast_tensors, load_optimizer
from lockstep.training.sync.buckets import Bucketed, Reducer

__all__ = [
    "DistributedOptimizer", "allreduce", "broadcast_optimizer_state", "broadcast_parameters", "init", "local_rank", "local_size",
    "partition_dataset", "rank", "shutdown", "size",
]  # fmt: skip


_joined = contextlib.ExitStack()
_world: World | None = None


def init() -> tuple[int, torch.device]:
    """Joins the ranks of this launch, once; returns this rank and its device.

    Raises:
        lockstep.training.contract.UserError: the launcher's variables contradict each other, or there are too few GPUs.
        ValueError: the script's own process group takes no CPU tensors.
    """
    global _world
    if _world is None and dist.is_initialized():  # by the script itself
        if torch.device("cpu") not in dist.distributed_c10d._get_default_group()._device_types:
            raise ValueError(
                f"the process group has no backend for CPU tensors ({dist.get_backend_config()}), which sizes and plain "
                "values travel as: call dist.init_process_group('cpu:gloo,cuda:nccl'), or leave it to hvd.init()"
            )
        _world = worlds.detect(os.environ)
        _world.device = worlds.choose_device(_world, "auto")
    elif _world is None:
        _world = _joined.enter_context(worlds.joined())
        atexit.register(shutdown)
    return _world.rank, _world.device


def shutdown() -> None:
    """Leaves the group; `init` may join again. Also done at the end of the process."""
    global _world
    _world = None
    _joined.close()


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


def allreduce(tensor: torch.Tensor, average: bool = True) -> torch.Tensor:
    """The mean (or the sum) over the ranks, as a new tensor. It has no gradient.

    Raises:
        ValueError: the gradient of `tensor` would be lost.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError("allreduce has no gradient: give it tensor.detach()")
    total = tensor.detach().clone()
    dist.all_reduce(total)
    if not average:
        return total
    return total / size() if total.is_floating_point() else total // size()


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


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Sends rank `root_rank`'s optimizer state, hyperparameters included, to all."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")  # noqa: TRY004 - as Horovod
    me = _me()
    state = broadcast_tree(optimizer.state_dict() if me.rank == root_rank else None, me, root_rank)
    if me.rank != root_rank:
        load_optimizer(optimizer, state)


_unequal_parts = False
"""A `PartitionedLoader` of this process has dealt parts of different sizes."""


class PartitionedLoader:
    """Batches (inputs, targets) of one rank's part of each global batch, on the device.

    A pass draws a new order, the same at every world size. The last batch of a pass is short where the batch size does
    not divide the data, and left out where it would leave a rank without a sample. Parts differ by at most one sample.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, world: World, device: torch.device | str | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`batch_size` is the global one; `device` None: the rank's. Floating-point inputs become `dtype`; targets keep their type.

        Raises:
            ValueError: a rank would have no sample.
        """
        self.dataset, self.batch_size, self.world, self.device, self.dtype = dataset, batch_size, world, device, dtype
        self.passes = 0
        self.count = len(dataset)  # type: ignore[arg-type]
        if batch_size < world.size or self.count < world.size:
            raise ValueError(
                f"a batch of {batch_size} out of {self.count} samples leaves some of {world.size} ranks without one"
            )

    @property
    def per_rank(self) -> int:
        """Samples of this rank in a full batch."""
        low, high = bounds(self.batch_size, self.world.rank, self.world.size)
        return high - low

    def __len__(self) -> int:
        return self.count // self.batch_size + (self.count % self.batch_size >= self.world.size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        global _unequal_parts
        number, self.passes = self.passes, self.passes + 1
        for step in range(len(self)):
            ids = global_ids(self.count, 0, number, step, self.batch_size, "weight")
            _unequal_parts |= len(ids) % self.world.size != 0
            rank_ids = ids[slice(*bounds(len(ids), self.world.rank, self.world.size))]
            inputs, targets = default_collate([self.dataset[i] for i in rank_ids.tolist()])
            device = self.device or self.world.device
            yield inputs.to(device=device, dtype=self.dtype), targets.to(device)


def partition_dataset(
    dataset: Dataset[Any], batch_size: int, device: torch.device | str | None = None, dtype: torch.dtype | str = torch.float32,
) -> tuple[PartitionedLoader, int]:  # fmt: skip
    """(a loader of this rank's part of each batch of all ranks, the size of that part), of a data set of (input, target).

    Raises:
        ValueError: a rank would have no sample, or `dtype` is neither a type of torch's nor the name of one.
    """
    of_torch = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(of_torch, torch.dtype):
        raise ValueError(f"dtype must be one of torch's, e.g. torch.float32 or 'float32', got {dtype!r}")  # noqa: TRY004
    loader = PartitionedLoader(dataset, batch_size, _me(), device, of_torch)
    return loader, loader.per_rank


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    backward_passes_per_step: int = 1,
) -> torch.optim.Optimizer:  # fmt: skip
    """`optimizer` with gradients that are reduced over the ranks from inside `backward`; `step` waits for them.

    Of a subclass of its class, and sharing its state. Gradients of `backward_passes_per_step` are added up, then sent.

    Raises:
        ValueError: names in `named_parameters` that are not unique, parameters without a name.
    """
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        named_parameters = [(f"allreduce.noname.{number}", parameter) for number, parameter in enumerate(params)]
    named = list(named_parameters)
    if not all(isinstance(entry, tuple) and len(entry) == 2 for entry in named):
        raise ValueError("named_parameters must be (name, parameter) tuples, as model.named_parameters() gives them")
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"parameter names in named_parameters must be unique, found duplicates: {', '.join(twice)}")
    unnamed = [tuple(parameter.shape) for parameter in set(params) - {parameter for _, parameter in named}]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:5]}"
        )
    reduced = [(name, parameter) for name, parameter in named if parameter in set(params)]
    cls = type(optimizer)
    twin: Any = object.__new__(type(cls.__name__, (_Distributed, cls), {}))
    twin.__dict__.update(optimizer.__dict__)
    twin._reducer = Reducer(reduced, mean=True, passes=backward_passes_per_step)
    # A script that continues with the original optimizer must fail (on its second gradient), not train each rank alone.
    optimizer._reducer = twin._reducer  # type: ignore[attr-defined]
    distributed: torch.optim.Optimizer = twin
    return distributed


class _Distributed:
    """Mixed into the class of the user's optimizer, in front of it."""

    _reducer: Reducer
    _synchronized = False
    _should_synchronize = True
    _weighting_settled = False
    """Whether `set_samples` was called, or the user was warned that it was not."""

    def synchronize(self) -> None:
        """Returns when all gradients are reduced. A parameter that got none on this rank counts as zero, and has none if no rank
        has one."""
        self._reducer.synchronize()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` inside does not synchronise: for scripts that did, to clip or unscale the gradients in between."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_samples(self, count: int) -> None:
        """The rank's batch has `count` samples, m_k of n: call it before `backward`, on all ranks. Collective.

        From here on gradients of mean losses are weighted m_k / n and summed, which gives exactly the gradient of the
        mean over the whole batch, however unequal the parts are. A rank without samples leaves `backward` out.
        """
        total = torch.tensor(float(count), dtype=torch.float64)
        dist.all_reduce(total)
        if not total:
            raise ValueError("no rank has a sample")
        self._reducer.weight, self._reducer.mean = count / float(total), False
        self._weighting_settled = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise ValueError("a group that is added now is not reduced: add it before the optimizer is distributed")

    def step(self, closure: Any = None) -> Any:
        if not self._weighting_settled and _unequal_parts and self._reducer.size > 1:
            self._weighting_settled = True
            warnings.warn(
                "the ranks' parts of a batch differ in size, and the mean of their mean gradients is not that of the batch: "
                "call optimizer.set_samples(len(target)) before backward(), on all ranks",
                stacklevel=2,
            )
        if closure is not None:
            raise ValueError("a closure would compute gradients that are not synchronised: call step() without one")
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn("step() synchronises again: call it inside optimizer.skip_synchronize()", stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Also called `reset_grad`."""
        if self._reducer.pending:
            raise AssertionError(
                "zero_grad() races with gradients that are on their way: call step() or synchronize() first"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    reset_grad = zero_grad


class Horovod(Bucketed):
    """What a Horovod script does, as a strategy of the loop."""

    averages_gradients = True
    one_model = one_optimizer = True

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        global _world
        _world = world  # the loop has joined already, and leaves by itself
        self.model, self.world = model, world
        broadcast_parameters(model)
        return model

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        distributed: Any = DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        self.reducer = distributed._reducer
        self._known = {*self.reducer.names, *(p for p in self.model.parameters() if p.requires_grad)}
        broadcast_optimizer_state(optimizer)
        return optimizer  # the loop calls `synchronize` before its step

    def synchronize(self) -> None:
        super().synchronize()
        self.check_summed(self._known | self.reducer.names.keys())
