"""torch's DistributedDataParallel: the baseline, and the default of recipes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config.settings import Section
from ..contract import UserError, first_of
from ..parallel.world import World
from .base import GradientSync, GradientWatch, nbytes, undisturbed

_KNOWN = inspect.signature(DistributedDataParallel.__init__).parameters
_NEW = "forward_sync_buffers" in _KNOWN  # torch 2.15 renamed it
_LOCAL_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


class _Network(DistributedDataParallel):
    """torch's DDP, with parameters, buffers and modules under the names of the wrapped network.

    By these names a script selects layers to freeze, and the groups of its optimizer. The state dict is that of torch's DDP, so that a
    module that contains the network can load its own saved state.
    """

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **named)  # type: ignore[no-any-return]

    def named_buffers(self, *args: Any, **named: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **named)  # type: ignore[no-any-return]

    def named_modules(self, *args: Any, **named: Any) -> Iterator[Any]:
        return self.module.named_modules(*args, **named)  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        model = self.__dict__.get("_modules", {}).get("module")
        if isinstance(value, torch.Tensor) and model is not None and name in {**model._parameters, **model._buffers}:
            raise UserError(
                f"{name} is a parameter or buffer of the network within, which sync.name=ddp would call without this value: set it on "
                "network.module, and for functional_call take another strategy (sync.name=flat)"
            )
        super().__setattr__(name, value)


class DdpOptions(Section):
    find_unused: bool = False
    """Look through the graph of every forward pass for parameters that it leaves out (torch's `find_unused_parameters`)."""


class Ddp(GradientSync):
    Options = DdpOptions
    averages_gradients = True
    watch: GradientWatch

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        self.model, self.world = model, world
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._step_bytes = sum(map(nbytes, self._names))
        self.watch = GradientWatch(world, unused=self.options.find_unused)
        self.watch.expect(self._names)  # hooked before DDP's own hooks, which wait for the other ranks
        for parameter in self._names:
            _match_strides_of_gradient(parameter)
        self.network: DistributedDataParallel = _Network(
            model,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            **_LOCAL_BUFFERS,  # batch statistics stay local; evaluation averages them
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.settings.bucket_mb * 1e6 / 2**20,
            find_unused_parameters=self.options.find_unused,
        )
        self.watch.announced = set()
        if example is None:
            self._until_first = self.network.register_forward_pre_hook(self._first_pass, with_kwargs=True)
        else:
            self._warm_up(example)
        self.network.register_forward_pre_hook(self._announce)
        return self.network

    def _announce(self, *_: Any) -> None:
        """Announces a forward pass: DDP sums the gradients of one backward pass after it, and silently leaves out those of other passes."""
        if torch.is_grad_enabled() and self.network.require_backward_grad_sync:
            self.watch.announced = set(self._names)

    def _first_pass(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:  # noqa: ARG002
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._names):  # none: another model's step
            self._until_first.remove()
            syncs, self.network.require_backward_grad_sync = self.network.require_backward_grad_sync, True
            # The graph of another network is its loss's.
            args, named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, named))
            self._warm_up(*args, **named)
            self.network.require_backward_grad_sync = syncs

    def _warm_up(self, *args: Any, **named: Any) -> None:
        """Runs one backward pass with these arguments of the network, and restores buffers and gradients.

        torch reorders its buckets after the first backward pass, and with them the order of summation. Without this pass a resumed
        run's first step sums in another order than the uninterrupted run's.
        """
        announced, self.watch.announced = self.watch.announced, set(self._names)
        with undisturbed(self.model):
            outputs = [
                t for t in tree_leaves(self.network(*args, **named)) if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            (torch.stack([tensor.sum() for tensor in outputs]).sum() * 0.0).backward()
        self._check_all_used()
        self.watch.announced = announced
        self.zero_grad()

    def zero_grad(self) -> None:
        self._begin()
        super().zero_grad()

    def _begin(self) -> None:
        """Prepares for the next step. Also called after a step, for loops that clear the gradients with their optimizer."""
        self.watch.clear()
        self.watch.expect(self._names)

    @contextlib.contextmanager
    def accumulate(self) -> Any:
        announced, self.watch.announced = self.watch.announced, None
        try:
            with self.network.no_sync():
                yield
        finally:
            self.watch.announced = announced
        self.watch.expect(self._names)

    def synchronize(self) -> None:
        if self.watch.past is not None:
            raise self.refuse(
                f"has not summed the gradient of {self._names[cast(nn.Parameter, self.watch.past)]} over the ranks, since the forward "
                "pass went past the network that replicate() or wrap() returned, or an earlier backward() has used it up",
                "call that network, once for each backward(), or use sync.name=flat, which sums whatever has come",
            )
        self.check_summed(self._names)
        self._check_all_used()  # DDP itself has waited within the backward pass
        self.watch.announced = set()
        self._begin()
        self.bytes_sent += self._step_bytes if self.world.size > 1 else 0

    def _check_all_used(self) -> None:
        """Raises `UserError` if a parameter got no gradient: DDP would wait for it, here in the next step, on other ranks in this one.

        Other ranks that have all their gradients end because this rank's process ends.
        """
        if not self.watch.missing or self.options.find_unused:
            return
        names = [name for parameter, name in self._names.items() if parameter in self.watch.missing]
        raise self.refuse(
            f"needs a gradient for every parameter in each step, and {first_of(names, 3)} got none",
            "use sync.name=flat, which leaves such a parameter alone, or set sync.options={find_unused: true}",
        )


def _match_strides_of_gradient(parameter: nn.Parameter) -> None:
    """Gives a filter with one input channel the strides of its gradient, so that DDP neither copies the gradient nor warns. The same memory
    has two valid strides, contiguous and channels_last, and a convolution's gradient has the latter."""
    if parameter.ndim == 4 and parameter.shape[1] == 1 and parameter.is_contiguous():
        strides = torch.empty(parameter.shape, device="meta", memory_format=torch.channels_last).stride()
        parameter.data = parameter.data.as_strided(parameter.shape, strides)
