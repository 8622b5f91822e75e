"""The interface of every gradient-sync strategy, and common code of the strategies, such as autograd's hooks. The training loop uses
only this interface.

The loop backpropagates `local_sum * loss_factor / divisor`: the sum of the losses of the rank's own samples, divided by the size of the
*global* batch (1 for a summed loss). The sum of these gradients over the ranks is the gradient of the global batch, however unequal
the parts are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from ..config import Sync
from ..config import settings as typed
from ..contract import UserError
from ..data import order
from ..data.pytree import to_device
from ..generators import RngScope
from ..parallel.names import COMPILED
from ..parallel.world import World

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Parameters = Collection[torch.Tensor]
"""A set of parameters, for membership tests."""


class GradientSync(ABC):
    model: nn.Module
    """The user's module; `wrap` sets it."""
    world: World
    """The ranks; `wrap` sets it."""
    Options: ClassVar[type[typed.Section]] = typed.Section
    """The strategy's own settings (`sync.options`); by default none."""
    averages_gradients: bool = False
    """Whether the strategy averages the ranks' gradients, as torch's DDP and FSDP do; False: it sums them."""
    bytes_sent: int = 0
    """Bytes of payload in the collectives that this rank has joined for its steps so far: gradients, and parameters if the strategy
    sends those, too."""
    capturable: bool = False
    """Whether a step with this strategy can be recorded in a CUDA graph."""
    is_replicated: bool = True
    """Whether every rank holds all parameters."""
    shards_gradients: bool = False
    """Whether each rank has the sum of a part of the gradients only."""
    has_memory: bool = False
    """Whether the strategy stores values of the gradients from step to step (`gradients_rescaled`, `forget_nonfinite`)."""
    compiles: bool = True
    """Whether a recipe may compile the network that `wrap` returns."""
    one_model: bool = False
    """Whether a run may have only one model."""
    one_optimizer: bool = False
    """Whether a run may have only one optimizer."""
    batch_parts: order.Parts | None = None
    """The parts of a global batch that a rank computes one by one (`exact.py`); None: a rank computes its samples at once."""
    watch: GradientWatch | None = None
    """The times of the rank's own gradients, if the strategy waits for other ranks before `synchronize`; None: it does not."""

    def __init__(self, settings: Sync) -> None:
        """Reads the strategy's options. Raises `UserError` for an unknown option."""
        self.settings = settings
        self.options: Any = typed.build(self.Options, settings.options, f"sync {settings.name}", "sync.options.")

    @property
    def loss_factor(self) -> float:
        """The factor of the loss: the world size if the strategy averages, else 1."""
        return float(self.world.size) if self.averages_gradients else 1.0

    def check_summed(self, known: Parameters) -> None:
        """Raises `UserError` for a trained parameter that is not among the parameters that the strategy sums."""
        if not trains_another(self.model, set(map(id, known))):
            return
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter not in known:
                raise self.refuse(
                    f"has not summed the gradient of {name}, which did not train yet when the model was wrapped",
                    "let it train at replicate() or wrap(), or use sync.name=flat",
                )

    def refuse(self, problem: str, remedy: str) -> UserError:
        return UserError(f"sync.name={self.settings.name} {problem}: {remedy}")

    @abstractmethod
    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        """Returns the network to call. From now on the replicas have rank 0's parameters and buffers. Collective.

        `example` is a batch that the network accepts; a strategy may run it, and must leave no trace of it. None: the strategy uses the
        first batch of the network.

        Raises:
            UserError: the strategy cannot serve this model, or this world.
        """

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        """Returns the optimizer over the model's parameters. Strategies that shard its state override this method.

        Raises:
            UserError: the strategy cannot work with this optimizer.
        """
        optimizer = build(self.model.parameters())
        # The hooks hold the strategy weakly (`on_grad`): a script that keeps only its optimizer keeps it so.
        optimizer.sync = self  # type: ignore[attr-defined]
        return optimizer

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.model.parameters():
            parameter.grad = None

    @abstractmethod
    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context whose backward passes add to the gradients and send nothing. The next pass after it sends the sum."""

    @abstractmethod
    def synchronize(self) -> None:
        """Makes every `.grad` that the optimizer reads the gradient of the global batch. Collective.

        The loop calls it once a step, between the last `backward` and the optimizer's `step`. A parameter without a gradient on any rank
        has none afterwards, so that the optimizer does not change it.

        A NaN or an infinity in one rank's gradient of a parameter must make its gradient non-finite on every rank that holds it, so that
        `grad_norm` shows it on all ranks. A strategy that scales or compresses must keep the value: a maximum, a clamp or a cast to
        integers can lose it.
        """

    def forget_nonfinite(self) -> None:  # noqa: B027 - most strategies remember no gradients
        """Discards stored values of gradients that were not finite. They must be as finite afterwards as before the step.

        The loop calls it after `synchronize`: with `zero_grad`, in place of the optimizer's `step`, if the gradient is not finite; and if
        some parameters have no optimizer that steps now.
        """

    # `parameters` in what follows: only the gradients of these parameters; None: of all.

    def gradients(self, parameters: Parameters | None = None) -> list[torch.Tensor]:
        """Returns the synchronised gradients that this rank holds, by default of all parameters."""
        return [
            p.grad for p in self.model.parameters() if p.grad is not None and (parameters is None or p in parameters)
        ]

    def scale_gradients(self, factor: torch.Tensor, parameters: Parameters | None = None) -> None:
        """Multiplies the synchronised gradients, in place. `factor` is a scalar tensor [] on the device."""
        if grads := self.gradients(parameters):
            torch._foreach_mul_(grads, factor)

    def gradients_rescaled(self, factor: float) -> None:  # noqa: B027 - most strategies remember no gradients
        """Scales the stored values by `factor`: from now on gradients are `factor` times as large (`LossScaler`)."""

    def clip(
        self, max_norm: float, norm: torch.Tensor | None = None, parameters: Parameters | None = None
    ) -> torch.Tensor:
        """Scales the gradients to at most `max_norm` (L2, over all of them). Returns the norm before, a scalar tensor [].

        Args:
            norm: the result of `grad_norm`, if it was called: under some strategies it is a collective.
        """
        norm = self.grad_norm(parameters) if norm is None else norm
        self.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0), parameters)  # as nn.utils.clip_grad_norm_
        return norm

    def grad_norm(self, parameters: Parameters | None = None) -> torch.Tensor:
        """Returns the L2 norm of the gradients, a scalar tensor []. The same on every rank; not finite if any rank's gradient is not."""
        parts = self.gradients(parameters)
        if not self.shards_gradients:
            return nn.utils.get_total_norm(parts, foreach=True)
        squared = nn.utils.get_total_norm(parts).to(device=self.world.device, dtype=torch.float64) ** 2
        dist.all_reduce(squared)
        return squared.sqrt()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's own state, a part of the checkpoint. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most strategies have none
        """Restores this rank's own state. Collective."""

    def merged_state(self, states: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002 - most strategies have none
        """Returns one state, merged from the saved states of all ranks, for every rank at another world size. Runs on one rank only.

        The total that all ranks still have to send must stay the same: a strategy that averages takes the mean of the ranks' memories.
        """
        return {}

    # The methods below are for strategies that shard the parameters or the optimizer's state.

    def duplicate(self) -> nn.Module:
        """Returns a copy of the model, in the model's layout."""
        return copy.deepcopy(self.model)

    def full_module(self, module: nn.Module) -> nn.Module:
        """Returns `module` (the model or a duplicate) with full parameters, for calls on this rank alone. Collective."""
        return module

    def full_parameters(self, module: nn.Module) -> dict[str, torch.Tensor] | None:
        """Returns the full parameters of `module` (the model or a duplicate) by name, on rank 0; elsewhere perhaps None. Gathers them one
        after the other. Collective."""
        return dict(module.named_parameters())

    def copy_into_shard(self, parameter: torch.Tensor, full: torch.Tensor) -> None:
        """Copies a full parameter into this rank's shard. `full` has the shape of the unsharded parameter."""
        parameter.copy_(full)

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        """Returns the parameters of each group, in the order of their numbers in the whole `state_dict`."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def regroup(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Sets the optimizer's groups of parameters. The settings of a group count if the optimizer has no group of its number."""
        for live, group in zip(optimizer.param_groups, groups):
            live.update({name: group[name] for name in ("params", "param_names") if name in group})
        del optimizer.param_groups[len(groups) :]
        for group in groups[len(optimizer.param_groups) :]:
            names = group.get("param_names")
            params = group["params"] if names is None else list(zip(names, group["params"]))
            settings = {name: value for name, value in group.items() if name != "param_names"}
            optimizer.add_param_group({**settings, "params": params})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Returns the unsharded `state_dict` of the optimizer, on the same ranks as `full_parameters`. Collective."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's shard of an unsharded `state_dict`, saved at any world size.

        Raises:
            ValueError: the state has other groups of parameters than the optimizer.
        """
        load_optimizer(optimizer, state)


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Runs the optimizer's `load_state_dict`. Gives every entry the saved dtype, and the memory layout of its parameter.

    torch converts entries to the parameter's dtype, which would round the float32 weights that an optimizer keeps for a bfloat16 model.
    torch's fused optimizers use memory addresses: with a channels_last parameter, a contiguous momentum would silently be
    applied to other elements.
    """
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        saved, entries = state["state"].get(number, {}), optimizer.state.get(parameter, {})
        for name, value in entries.items():
            before = saved.get(name)
            if not isinstance(value, torch.Tensor):
                entries[name] = to_device(before, parameter.device)
                continue
            if isinstance(before, torch.Tensor) and before.dtype != value.dtype:
                entries[name] = value = before.to(value.device, copy=True)
            if value.shape == parameter.shape and value.stride() != parameter.stride():
                entries[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


@torch.no_grad()
def broadcast_module(model: nn.Module) -> None:
    """Copies rank 0's parameters and buffers to all ranks, with one broadcast for each element type. Collective."""
    broadcast_tensors([*model.parameters(), *model.buffers()])


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], source: int = 0) -> None:
    """Copies the tensors of rank `source` to all ranks, in place, with one broadcast for each element type. Collective.

    All ranks must pass tensors of the same shapes and types, in the same order.
    """
    if dist.get_world_size() == 1:
        return  # on a GPU a communicator is made for the first collective, which takes its time
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        dist.broadcast(flat, source)
        for tensor, piece in zip(group, flat.split([tensor.numel() for tensor in group])):
            tensor.copy_(piece.view(tensor.shape))


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restores the model's buffers and the generators after a forward pass in the block."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with RngScope(next(model.parameters()).device):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)


def is_compiled(model: nn.Module) -> bool:
    """Returns whether `model` comes from `torch.compile`, without loading the compiler."""
    return COMPILED in model._modules


def trains_another(model: nn.Module, ids: Container[int]) -> bool:
    """Returns whether a parameter trains whose id is not among these. Each step asks: `parameters` takes four times as long."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in ids:
                return True
        for inner in module._modules.values():
            if inner is not None:
                waiting.append(inner)
    return False


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that require gradients, last layers first: roughly the order of the backward pass."""
    return [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]


def placed(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view of a piece of a vector with the parameter's shape and strides: channels_last weights get gradients of the same layout.
    The view of a parameter with gaps in memory, such as a slice of columns, has no gaps."""
    like = parameter if parameter.is_contiguous() else torch.empty_like(parameter, device="meta")
    return piece.as_strided(parameter.shape, like.stride(), piece.storage_offset())


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1-d view of a tensor without gaps, in the order of its elements in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def stands_for_none(firsts: torch.Tensor) -> torch.Tensor:
    """Returns, for each first element of a sum, whether no rank has a gradient: the element is -0.0 then (`buckets.py`)."""
    return (firsts.real == 0) & firsts.real.signbit()


def capturing(tensor: torch.Tensor) -> bool:
    """Returns whether a recording is under way on the tensor's device, so that the host cannot read the tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_recording(parameter: torch.Tensor, problem: str) -> None:
    """Raises `RuntimeError` if a CUDA graph is being recorded."""
    if capturing(parameter):
        raise RuntimeError(problem)


def nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


Mark: TypeAlias = "float | torch.cuda.Event"
"""A point in time: seconds of the host, or an event in the GPU's stream."""


def mark(device: torch.device) -> Mark:
    """Returns a mark of this point of the rank's work, for a `StepClock`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def on_grad(parameter: torch.Tensor, method: Callable[[Any], None]) -> None:
    """Calls `method(parameter)` as soon as autograd has the parameter's gradient, while the method's object lives.

    Python's garbage collector does not see a tensor's hooks. With a reference in a hook, a strategy and its model would keep each other
    alive for ever, and with them a destroyed process group.
    """
    weak = weakref.WeakMethod(method)

    def hook(ready: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(ready)

    parameter.register_post_accumulate_grad_hook(hook)


def hooks_of(model: nn.Module) -> Iterator[tuple[int, str, bool, Any]]:
    """Yields (number, parameter's name, whether it gets an accumulated gradient, function) of each hook on a parameter. No other hook of
    the process gets the number."""
    for name, parameter in model.named_parameters():
        for after, hooks in enumerate((parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
            for number, hook in (hooks or {}).items():
                yield number, name, bool(after), hook


def hooks_of_script(model: nn.Module, of_strategy: Container[int] = ()) -> Iterator[tuple[str, bool]]:
    """Yields (parameter's name, whether the hook gets an accumulated gradient) of each hook that the script has registered, and not torch,
    Lockstep or the strategy."""
    for number, name, after, hook in hooks_of(model):
        if number not in of_strategy and not is_ours(hook):
            yield name, after


def is_ours(hook: Any) -> bool:
    """Returns whether torch or Lockstep defines the function."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(("torch.", "lockstep."))


class GradientWatch:
    """The time at which all of this rank's own gradients are complete, and its waits for other ranks before.

    It serves strategies that wait for other ranks inside the forward or the backward pass. With any other strategy the own gradients are
    complete at the call of `synchronize`.

    Args:
        unused: whether some gradients may never come. Then the own part ends with the backward pass.
    """

    def __init__(self, world: World, unused: bool = False) -> None:
        self._world, self._unused = world, unused
        self._hooked: set[torch.Tensor] = set()
        self._queued = False
        self.missing: set[torch.Tensor] = set()
        """Parameters without a gradient so far in this pass."""
        self.announced: set[torch.Tensor] | None = None
        """Parameters whose next gradient a forward pass has announced to the sum; None: no announcement is needed now."""
        self.past: torch.Tensor | None = None
        """The first parameter whose gradient came without an announcement; None: there is none."""
        self.clear()

    def clear(self) -> None:
        """Forgets the records of this step."""
        self.complete: Mark | None = None
        """The mark of the last own gradient; None: some gradients are missing."""
        self.waits: list[tuple[Mark, Mark]] = []
        """(start, end) of each wait for other ranks before `complete`."""
        self._waits_since: list[tuple[Mark, Mark]] = []
        """(start, end) of each wait after `complete`; they count only if a further pass follows."""

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begins a pass that gives each of these parameters a gradient."""
        self.missing = set(parameters)
        for parameter in self.missing - self._hooked:
            on_grad(parameter, self._on_grad)
        self._hooked |= self.missing
        self._queued = False

    def _on_grad(self, parameter: torch.Tensor) -> None:
        self.missing.discard(parameter)
        if self.announced is not None:
            if parameter in self.announced:
                self.announced.discard(parameter)
            elif self.past is None:
                self.past = parameter
        if not self._unused:
            if not self.missing:
                self._completed()
        elif not self._queued:  # at the first gradient, so that it is called before a callback of DDP, which waits
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)

    def _on_end(self) -> None:
        self._queued = False
        self._completed()
        if self.announced:
            self.announced.clear()  # the others are not used, and count as here

    def _completed(self) -> None:
        self.complete = mark(self._world.device)
        self.waits += self._waits_since
        self._waits_since.clear()

    def now(self) -> Mark:
        return mark(self._world.device)

    def waited(self, since: Mark) -> None:
        """Records a wait for other ranks since this mark. It counts if own gradients come later."""
        self._waits_since.append((since, mark(self._world.device)))
