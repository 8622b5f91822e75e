"""Parameters, gradients and optimizer state sharded over the ranks: torch's `fully_shard` (FSDP2, ZeRO stage 3), block by block.

    lockstep run smoke --ranks 2 --set sync.name=examples.strategies.fsdp:Fsdp

Between steps a rank holds its share of everything. A block's parameters are gathered when it runs, forward or backward, and
sharded again when it is done; what belongs to no block is gathered for the whole pass. Every backward pass sums each gradient
where its part is kept. A save gathers one tensor after another on the rank that writes; evaluation sees full parameters. So
a run may resume at any world size; the average is sharded as the model is.

After S. Rajbhandari et al., "ZeRO" (2020), and Y. Zhao et al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.training.config.settings import Section
from lockstep.training.contract import UserError
from lockstep.training.parallel.exchange import any_rank, is_same_on_all_ranks
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import (
    GradientSync,
    GradientWatch,
    Parameters,
    broadcast_module,
    hooks_of_script,
    is_compiled,
    undisturbed,
)


class FsdpOptions(Section):
    blocks: list[str] | None = None
    """What is gathered by itself: names of submodules (`layers.*`) or of classes; an empty list: the whole network at once."""


def find_blocks(model: nn.Module, wanted: list[str] | None) -> list[nn.Module]:
    """The submodules to gather one at a time; a block within another comes after it.

    Args:
        wanted: patterns of names of submodules, or of classes. None: `model.fsdp_blocks`, a tuple of such patterns, or where
            the model has none the entries of each `ModuleList` and `Sequential` that has several of one class.

    Raises:
        UserError: a pattern that fits no submodule with parameters, or a block that shares a parameter with the rest.
    """
    inner = {name: m for name, m in model.named_modules() if name and _has_parameters(m)}
    patterns = getattr(model, "fsdp_blocks", None) if wanted is None else wanted
    if patterns is None:
        parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in inner}
        return [m for name, m in inner.items() if _is_repeated(m, parents[name]) and not _shared(model, m)]
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        fits = {n: m for n, m in inner.items() if fnmatchcase(n, pattern) or fnmatchcase(type(m).__name__, pattern)}
        if not fits:
            raise UserError(
                f"sync.options.blocks: no submodule or class of {type(model).__name__} is called {pattern!r}"
            )
        found |= fits
    for name, block in found.items():
        if shared := _shared(model, block):
            raise UserError(f"sync.options.blocks: {name}.{shared} is a parameter of the rest, too: leave {name} out")
    return [m for name, m in inner.items() if name in found]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_repeated(module: nn.Module, parent: nn.Module) -> bool:
    classes = Counter(type(m) for m in parent.children() if _has_parameters(m))
    return isinstance(parent, (nn.ModuleList, nn.Sequential)) and classes[type(module)] > 1


def _shared(model: nn.Module, block: nn.Module) -> str | None:
    """The name of a parameter of `block` that a module outside of it has, too."""
    inside = set(block.modules())
    outside = {p for m in model.modules() if m not in inside for p in m._parameters.values()}
    return next((name for name, p in block.named_parameters() if p in outside), None)


class _AllUsed(torch.autograd.Function):
    """Returns the first `count` tensors, and gives every other one a gradient of zero.

    FSDP sends the gradients that there are. If ranks disagreed about which those are, they would wait for each other.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.like = [(p.shape, p.dtype, p.device) for p in tensors[count:]]
        return tuple(output.clone() for output in tensors[:count])  # FSDP hangs a hook on each, which a view could lose

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return None, *grads, *zeros


class _Unit:
    """What FSDP gathers together: the parameters of a block, or of the network, that belong to no block within it."""

    def __init__(self, module: nn.Module, blocks: list[nn.Module], watch: GradientWatch) -> None:
        every = dict.fromkeys(module.modules())
        within = {m for block in blocks if block is not module and block in every for m in block.modules()}
        self._places = [(m, name) for m in every if m not in within for name in m._parameters]
        self._watch = watch

    def parameters(self) -> list[nn.Parameter]:
        """Sharded between steps; gathered ones are objects of their own."""
        found = [module._parameters[name] for module, name in self._places]
        return list(dict.fromkeys(parameter for parameter in found if parameter is not None))

    def all_used(self, _: nn.Module, __: Any, output: Any) -> Any:
        """A forward hook, to be called before FSDP's. Raises `UserError` where there is no tensor in `output`."""
        trained = [p for p in self.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not trained:
            return output
        self._watch.expect({*self._watch.missing, *trained})
        leaves, structure = tree_flatten(output)
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if not at:
            raise UserError(f"Fsdp needs a network and blocks that return tensors, got {type(output).__name__}")
        for n, tensor in zip(at, _AllUsed.apply(len(at), *(leaves[n] for n in at), *trained)):
            leaves[n] = tensor
        return tree_unflatten(leaves, structure)


class _Gathered(nn.Module):
    """The module that FSDP takes for its root."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.runs = False
        self.order: list[int] = []
        """The blocks that have run since `synchronize`, by number."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.runs = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self.runs = False

    def about_to_run(self, number: int, *_: Any) -> None:
        """A forward pre-hook of each block. Raises `UserError` where it does not run within the network."""
        if self.runs:
            self.order.append(number)
        elif torch._C._current_graph_task_id() == -1:  # activations may be computed anew in a backward pass
            raise UserError("Fsdp: call the network that replicate() or wrap() returned, not the model itself")


class _Passes(nn.Module):
    """The network to call.

    In a pass every rank gathers every block, so all ranks need the same number of passes: one that is at its last pass of a
    step, while others have more, takes passes without a gradient until they are there, too.
    """

    def __init__(self, gathered: _Gathered, world: World, watch: GradientWatch) -> None:
        super().__init__()
        self.module, self.world, self._watch = gathered, world, watch
        self.more = False
        """This rank has a further pass in this step."""
        self.count = 0
        """Passes since `synchronize`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            output = self.module(*args, **kwargs)
            cast(FSDPModule, self.module).reshard()  # no backward pass does it
            self._watch.clear()
            return output
        while self._others_go_on():
            self._pass_without_gradient(*tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
        return self._pass(args, kwargs)

    def _others_go_on(self) -> bool:
        since = self._watch.now()
        some_go_on = any_rank(self.more, self.world)
        self._watch.waited(since)
        return some_go_on and not self.more

    def _pass(self, args: Any, kwargs: Any) -> Any:
        self.count += 1
        self._watch.expect(())
        return self.module(*args, **kwargs)

    def _pass_without_gradient(self, args: Any, kwargs: Any) -> None:
        with undisturbed(self.module):
            tensors = [t for t in tree_leaves(self._pass(args, kwargs)) if isinstance(t, torch.Tensor)]
            (torch.stack([t.sum() for t in tensors if t.requires_grad]).sum() * 0.0).backward()


class Fsdp(GradientSync):
    Options = FsdpOptions
    averages_gradients = True
    is_replicated = False
    shards_gradients = True
    one_model = one_optimizer = True
    compiles = False
    watch: GradientWatch

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        if is_compiled(model):
            raise self.refuse("is not tested with torch.compile", "leave it out, or use sync.name=zero1")
        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:
                raise self.refuse(
                    f"cannot shard a parameter without dimensions, and {name} is one", "give it the shape [1]"
                )
        if hooked := next(hooks_of_script(model), None):
            raise self.refuse(
                f"replaces the parameters, and the hook on {hooked[0]} would be lost",
                "change the gradient between run.backward() and run.update(), or use sync.name=flat",
            )
        blocks = find_blocks(model, self.options.blocks)
        self.model, self.world = model, world
        # FSDP shards rows of contiguous parameters. Convolutions still use the memory layout of their images.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        broadcast_module(model)
        self._plain = copy.deepcopy(model).to("meta")
        self.watch = GradientWatch(world)
        self._root = _Gathered(model)
        self._pass_bytes = 0
        mesh = init_device_mesh(world.device.type, (world.size,))
        units = {module: _Unit(module, blocks, self.watch) for module in (*reversed(blocks), self._root)}
        for number, (module, unit) in enumerate(units.items()):
            self._pass_bytes += self._bytes_in_a_pass(unit, gathers=1 if module is self._root else 2)
            module.register_forward_hook(unit.all_used)
            sharded = fully_shard(module, mesh=mesh)
            # Else the next block would be there already while this one runs backward.
            sharded.set_modules_to_backward_prefetch([sharded])
            _note_waits(sharded, self.watch)
            if module is not self._root:
                module.register_forward_pre_hook(functools.partial(self._root.about_to_run, number), prepend=True)
        self.network = _Passes(self._root, world, self.watch)
        # Between a forward and its backward pass the root has full parameters in their place.
        self._sharded = list(model.parameters())
        return self.network

    def _bytes_in_a_pass(self, unit: _Unit, gathers: int) -> int:
        params = unit.parameters()
        summed = sum(self._padded_bytes(p) for p in params if p.requires_grad)
        return gathers * sum(self._padded_bytes(p) for p in params) + summed

    def _padded_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes of a parameter whose first dimension is filled up to a multiple of the world size."""
        if self.world.size == 1:
            return 0
        rows = -(-parameter.shape[0] // self.world.size) * self.world.size
        return rows * (parameter.numel() // max(parameter.shape[0], 1)) * parameter.element_size()

    def zero_grad(self) -> None:
        for parameter in self._sharded:
            parameter.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """The passes inside send their gradients, too: whole gradients of all blocks would have to be kept else."""
        self.network.more = True
        try:
            yield
        finally:
            self.network.more = False

    def synchronize(self) -> None:
        """Raises `UserError` on all ranks where they have run different blocks: one has used the parameters of another."""
        self.watch.clear()  # FSDP itself has waited within the forward and backward passes
        self.check_summed(set(self._sharded))
        if not is_same_on_all_ranks(self._root.order, self.world):
            raise self.refuse(
                "gathers blocks in the order in which they run, and the ranks have run different ones",
                "set sync.options={blocks: []}, which gathers the network at once, or name those that always run",
            )
        self.bytes_sent += self.network.count * self._pass_bytes
        self.network.count = 0
        self._root.order.clear()

    def gradients(self, of: Parameters | None = None) -> list[torch.Tensor]:
        return [_local(p.grad) for p in self._sharded if p.grad is not None and (of is None or p in of)]

    def full_module(self, module: nn.Module) -> nn.Module:
        return self._rebuilt(module, lambda parameter: cast(DTensor, parameter).full_tensor(), lambda buffer: buffer)

    def duplicate(self) -> nn.Module:
        return self._rebuilt(self.model, torch.clone, torch.clone)

    @torch.no_grad()
    def _rebuilt(
        self, module: nn.Module,
        parameter: Callable[[torch.Tensor], torch.Tensor], buffer: Callable[[torch.Tensor], torch.Tensor],
    ) -> nn.Module:  # fmt: skip
        """A copy of the user's module without FSDP's hooks. `parameter` and `buffer` make its tensors from those of `module`."""
        # A tensor that two modules share stays one.
        new: dict[int, torch.Tensor] = {id(b): buffer(b) for b in module.buffers()}
        new |= {id(p): nn.Parameter(parameter(p.detach()), p.requires_grad) for p in module.parameters()}
        old = dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])
        places = [*self._plain.named_parameters(), *self._plain.named_buffers()]
        # `deepcopy` takes these for the copies that it has made.
        made: dict[int, Any] = {id(place): new[id(old[name])] for name, place in places}
        return copy.deepcopy(self._plain, made).train(module.training)

    def full_parameters(self, module: nn.Module) -> dict[str, torch.Tensor] | None:
        keeps = self.world.leader
        full = {name: _whole(parameter.detach(), keeps) for name, parameter in module.named_parameters()}
        return full if keeps else None

    def copy_into_shard(self, parameter: torch.Tensor, full: torch.Tensor) -> None:
        shard, shards = _local(parameter), full.chunk(self.world.size)
        if self.world.rank < len(shards):  # a short first dimension leaves the last ranks without a shard
            shard.copy_(shards[self.world.rank])

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        keeps, state = self.world.leader, optimizer.state_dict()
        entries = {
            number: {name: _whole(value, keeps) for name, value in entry.items()}
            for number, entry in state["state"].items()
        }
        return {**state, "state": entries} if keeps else None

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of = dict(zip(numbers, params))

        def part(number: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape != of[number].shape:
                return value
            sharded = torch.zeros_like(of[number], dtype=value.dtype, requires_grad=False)
            self.copy_into_shard(sharded, value)
            return sharded

        entries = {n: {name: part(n, value) for name, value in entry.items()} for n, entry in state["state"].items()}
        optimizer.load_state_dict({**state, "state": entries})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(value: Any, keeps: bool) -> Any:
    """A tensor gathered from all ranks, in the memory of the host; None on ranks that do not keep it. Others as they are."""
    if not isinstance(value, DTensor):
        return value
    full = value.full_tensor()
    return full.cpu() if keeps else None


def _note_waits(sharded: FSDPModule, watch: GradientWatch) -> None:
    """In each of these methods of torch's a rank waits for the others: for a gather, or a sum."""
    group = sharded._get_fsdp_state()._fsdp_param_group
    if group is None:  # all parameters are in blocks within
        return
    for name in ("pre_forward", "pre_backward", "post_backward"):
        setattr(group, name, _noted(getattr(group, name), watch))


def _noted(method: Callable[..., Any], watch: GradientWatch) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(*args: Any, **kwargs: Any) -> Any:
        since = watch.now()
        found = method(*args, **kwargs)
        watch.waited(since)
        return found

    return noted
