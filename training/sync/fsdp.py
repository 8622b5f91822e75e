"""Parameters, gradients and optimizer state sharded over the ranks: torch's `fully_shard` (FSDP2, ZeRO stage 3).

Between steps a rank holds its share of everything; the first forward pass gathers the parameters, all in one piece, and
the last backward pass sums each gradient where its part is kept. The checkpoint and evaluation see full parameters, so a run may
go on at any world size; the average is sharded as the model is.

After S. Rajbhandari et al., "ZeRO" (2020), and Y. Zhao et al., "PyTorch FSDP" (2023).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lockstep.training.config import Config
from lockstep.training.contract import UserError
from lockstep.training.parallel.world import World
from lockstep.training.sync.base import (
    GradientSync,
    Parameters,
    broadcast_module,
    global_norm,
    is_compiled,
    make_contiguous,
)
from lockstep.training.sync.watch import GradientWatch


class _AllUsed(torch.autograd.Function):
    """Returns its first argument, and gives every other argument a gradient of zero.

    FSDP sends the gradients that there are. If ranks disagreed about which those are, they would wait for each other.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in params]
        return output.clone()  # FSDP hangs a hook on it, which a view could lose

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return grads[0], *zeros


class _Gathered(nn.Module):
    """The module that FSDP hooks into: gathered before its forward pass, sharded again after its backward pass.

    FSDP waits for the other ranks in both, so it is noted here how long a gathering took, and when the rank's own gradients
    were there.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self.watch = module, GradientWatch(device)

    def about_to_gather(self, *_: Any) -> None:
        """A forward pre-hook, to be called before FSDP's."""
        self._since = self.watch.now()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.watch.waited(self._since)
            # Gathered parameters are objects of their own. `_AllUsed` gives a gradient to all of them.
            self.watch.expect(p for p in self.module.parameters() if p.requires_grad)
        output = self.module(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise UserError(f"sync.name=fsdp needs a network that returns a tensor, got {type(output).__name__}")
        return _AllUsed.apply(output, *(p for p in self.module.parameters() if p.requires_grad))


class Fsdp(GradientSync):
    replicas = False

    def check(self, config: Config, world: World) -> None:  # noqa: ARG002
        self._refuse(config.compile)

    def _refuse(self, compiled: bool) -> None:
        if compiled:
            raise self.refuse("is not tested with compile=true", "set compile=false, or use sync.name=zero1")

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:  # noqa: ARG002 - nothing to warm up
        self._refuse(is_compiled(model))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:
                raise self.refuse(
                    f"cannot shard a parameter without dimensions, and {name} is one", "give it the shape [1]"
                )
        self.model, self._world, self.loss_factor = model, world, float(world.size)
        # FSDP shards rows of contiguous parameters. Convolutions still use the memory layout of their images.
        make_contiguous(model)
        broadcast_module(model)
        self._plain = copy.deepcopy(model).to("meta")
        self.network = _Gathered(model, world.device)
        self.watch = self.network.watch
        fully_shard(self.network, mesh=init_device_mesh(world.device.type, (world.size,)))
        self.network.register_forward_pre_hook(self.network.about_to_gather, prepend=True)
        # Between a forward and its backward pass the model has full parameters in their place.
        self._sharded = list(model.parameters())
        self._gather_bytes = sum(self._padded_bytes(p) for p in model.parameters())
        self._sum_bytes = sum(self._padded_bytes(p) for p in model.parameters() if p.requires_grad)
        return self.network

    def _padded_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes of a parameter whose first dimension is filled up to a multiple of the world size."""
        if self._world.size == 1:
            return 0
        rows = -(-parameter.shape[0] // self._world.size) * self._world.size
        return rows * (parameter.numel() // max(parameter.shape[0], 1)) * parameter.element_size()

    def zero_grad(self) -> None:
        for parameter in self._sharded:
            parameter.grad = None

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        # The parameters stay gathered until the pass that sends: ranks may differ in how many passes come before it,
        # and a gather in each of them would wait for ranks that have none left.
        network = cast(FSDPModule, self.network)
        network.set_requires_gradient_sync(False)
        network.set_reshard_after_backward(False)
        try:
            yield
        finally:
            network.set_requires_gradient_sync(True)
            network.set_reshard_after_backward(True)

    def synchronize(self) -> None:
        self.network.watch.clear()  # FSDP itself has waited within the forward and backward passes
        self.bytes_sent += self._gather_bytes + self._sum_bytes

    def gradients(self, of: Parameters | None = None) -> list[torch.Tensor]:
        return [_local(p.grad) for p in self._sharded if p.grad is not None and (of is None or p in of)]

    def grad_norm(self, of: Parameters | None = None) -> torch.Tensor:
        return global_norm(self.gradients(of), self._world)

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
        plain = copy.deepcopy(self._plain).train(module.training)
        params = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        made: dict[int, Any] = {}  # a tensor that two modules share stays one
        for path, place in plain.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for name in [name for name, old in place._parameters.items() if old is not None]:
                source = params[prefix + name]
                if id(source) not in made:
                    made[id(source)] = nn.Parameter(parameter(source.detach()), source.requires_grad)
                place._parameters[name] = made[id(source)]
            for name in [name for name, old in place._buffers.items() if old is not None]:
                held = buffers[prefix + name]
                if id(held) not in made:
                    made[id(held)] = buffer(held)
                place._buffers[name] = made[id(held)]
        return plain

    def copy_into_shard(self, parameter: torch.Tensor, full: torch.Tensor) -> None:
        shard, shards = _local(parameter), full.chunk(self._world.size)
        if self._world.rank < len(shards):  # a short first dimension leaves the last ranks without a shard
            shard.copy_(shards[self._world.rank])

    def optimizer_state(self, optimizer: torch.optim.Optimizer, everywhere: bool = False) -> dict[str, Any] | None:
        state = optimizer.state_dict()
        entries = {
            number: {
                name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in entry.items()
            }
            for number, entry in state["state"].items()
        }
        return {**state, "state": entries} if everywhere or self._world.leader else None

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
