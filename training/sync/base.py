"""The interface of every gradient-sync strategy, and what strategies share, such as autograd's hooks. The training loop uses nothing
else of a strategy.

The loop backpropagates `local_sum * loss_factor / divisor`. It is the sum of the losses of the rank's own samples,
divided by the size of the *global* batch (1 for a summed loss). Summed over the ranks that is the gradient of the global
batch, however unequal the parts are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import BackwardCFunction

from ..config import Sync
from ..config import settings as typed
from ..contract import UserError
from ..data import order
from ..parallel.names import COMPILED
from ..parallel.world import World

BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Parameters = Collection[torch.Tensor]
"""A set: what is looked for in it is parameters."""


class NotSummed(UserError):
    """A gradient stayed this rank's own. With `reaches_all` that of all ranks is NaN now, so that all look, and hear of it."""

    def __init__(self, message: str, reaches_all: bool) -> None:
        super().__init__(message)
        self.reaches_all = reaches_all


class GradientSync(ABC):
    model: nn.Module
    """The module as the user wrote it; set by `wrap`."""
    world: World
    """The ranks; set by `wrap`."""
    Options: ClassVar[type[typed.Section]] = typed.Section
    """The strategy's own settings (`sync.options`): it has none."""
    averages_gradients: bool = False
    """Whether it averages the ranks' gradients, as torch's DDP and FSDP do; else it sums them."""
    bytes_sent: int = 0
    """Payload of the collectives that this rank has joined for its steps so far, in bytes. It has the gradients, and the
    parameters if a strategy sends those, too."""
    capturable: bool = False
    """Whether a step with this strategy can be recorded in a CUDA graph."""
    is_replicated: bool = True
    """Whether every rank holds all parameters."""
    shards_gradients: bool = False
    """Whether each rank has the sum of a part of the gradients only."""
    has_memory: bool = False
    """Whether it stores something of the gradients from step to step (`gradients_rescaled`, `forget_nonfinite`)."""
    compiles: bool = True
    """Whether a recipe may compile the network that `wrap` returns."""
    one_model: bool = False
    """Whether a run may have one model only."""
    one_optimizer: bool = False
    """Whether a run may have one optimizer only."""
    batch_parts: order.Parts | None = None
    """How a global batch is cut into parts that a rank computes one by one (`exact.py`); None: a rank computes its samples at once."""
    watch: GradientWatch | None = None
    """When the rank's own gradients were complete, where a strategy waits for other ranks before `synchronize`."""

    def __init__(self, settings: Sync) -> None:
        """Raises `UserError` for an option that the strategy does not have."""
        self.settings = settings
        self.options: Any = typed.build(self.Options, settings.options, f"sync {settings.name}", "sync.options.")

    @property
    def loss_factor(self) -> float:
        """What the loop multiplies the loss by: the world size where the strategy averages, else 1."""
        return float(self.world.size) if self.averages_gradients else 1.0

    def check_summed(self, known: Parameters) -> None:
        """Raises `UserError` for a parameter that trains and is not among these, which the strategy sums."""
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
        """The network to call. The replicas have rank 0's parameters and buffers from here on.

        `example` is a batch that the network accepts; a strategy may run it, and leaves no trace of it. Where it is None,
        the first batch that the network is called with serves for that.

        Raises:
            UserError: a model, or a world, that the strategy cannot serve.
        """

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        """The optimizer over the model's parameters; strategies that shard it change it.

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
        """Backward passes inside add to the gradients and send nothing; the next one outside sends the sum."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when every `.grad` that the optimizer reads is the gradient of the global batch.

        Called once a step, between the last `backward` and the optimizer's `step`. A parameter without a gradient on any rank
        has none afterwards, so that the optimizer leaves it alone.

        A NaN or an infinity in one rank's gradient of a parameter leaves its gradient non-finite on every rank that holds it.
        So `grad_norm` shows it to all. A strategy that scales or compresses must keep the value: a maximum, a
        clamp or a cast to integers can lose it.
        """

    def discard(self) -> None:
        """Discards the gradients of this step, and what the strategy has stored from them.

        Called after `synchronize`, in place of the optimizer's `step`, where the gradient is not finite. What the strategy
        remembers from step to step must be as finite afterwards as before that step.
        """
        self.zero_grad()
        self.forget_nonfinite()

    def forget_nonfinite(self) -> None:  # noqa: B027 - most strategies remember no gradients
        """Discards what the strategy has stored from gradients that were not finite: of parameters, say, that no optimizer
        steps now."""

    # `parameters` in what follows: only the gradients of these parameters; None: of all.

    def gradients(self, parameters: Parameters | None = None) -> list[torch.Tensor]:
        """The synchronised gradients, as far as this rank holds them."""
        return [
            p.grad for p in self.model.parameters() if p.grad is not None and (parameters is None or p in parameters)
        ]

    def scale_gradients(self, factor: torch.Tensor, parameters: Parameters | None = None) -> None:
        """Multiplies the synchronised gradients, in place. `factor` is a scalar tensor [] on the device."""
        if grads := self.gradients(parameters):
            torch._foreach_mul_(grads, factor)

    def gradients_rescaled(self, factor: float) -> None:  # noqa: B027 - most strategies remember no gradients
        """From now on gradients are `factor` times as large (`LossScaler`): the strategy scales what it has stored of them."""

    def clip(
        self, max_norm: float, norm: torch.Tensor | None = None, parameters: Parameters | None = None
    ) -> torch.Tensor:
        """Scales the gradients to at most `max_norm` (L2, over all of them). Returns the norm before, a scalar tensor [].

        Args:
            norm: what `grad_norm` gave, where it was called: under some strategies it is a collective.
        """
        norm = self.grad_norm(parameters) if norm is None else norm
        self.scale_gradients((max_norm / (norm + 1e-6)).clamp(max=1.0), parameters)  # as nn.utils.clip_grad_norm_
        return norm

    def grad_norm(self, parameters: Parameters | None = None) -> torch.Tensor:
        """The L2 norm of the gradients, a scalar tensor []. The same on every rank; not finite if any rank's gradient is not."""
        parts = self.gradients(parameters)
        if not self.shards_gradients:
            return nn.utils.get_total_norm(parts, foreach=True)
        norm = nn.utils.get_total_norm(parts) if parts else torch.zeros(())
        squared = norm.to(device=self.world.device, dtype=torch.float64) ** 2
        dist.all_reduce(squared)
        return squared.sqrt()

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, part of the checkpoint. Collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most strategies have none
        """Collective."""

    def merged_state(self, states: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002 - most strategies have none
        """Merges the saved states of all ranks into the one that every rank loads at another world size. Called on one rank only.

        What all ranks together still have to send must stay the same: one that averages takes the mean of its memories.
        """
        return {}

    # The methods below are for strategies that shard the parameters or the optimizer's state.

    def duplicate(self) -> nn.Module:
        """A copy of the model, laid out as the model is."""
        return copy.deepcopy(self.model)

    def full_module(self, module: nn.Module) -> nn.Module:
        """`module` (the model or a duplicate) with full parameters, to be called by this rank alone. Collective."""
        return module

    def full_parameters(self, module: nn.Module) -> dict[str, torch.Tensor] | None:
        """The full parameters of `module` (the model or a duplicate) by name, on rank 0; elsewhere it may be None. Collective:
        they are gathered one after the other."""
        return dict(module.named_parameters())

    def copy_into_shard(self, parameter: torch.Tensor, full: torch.Tensor) -> None:
        """Copies a full parameter into this rank's shard. `full` has the shape of the unsharded parameter."""
        parameter.copy_(full)

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
        """The parameters of each group, in the order in which the whole `state_dict` numbers them."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def regroup(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        """Gives the optimizer these groups of parameters. The settings of a group count where the optimizer has none of its number."""
        for live, group in zip(optimizer.param_groups, groups):
            live.update({name: group[name] for name in ("params", "param_names") if name in group})
        del optimizer.param_groups[len(groups) :]
        for group in groups[len(optimizer.param_groups) :]:
            names = group.get("param_names")
            params = group["params"] if names is None else list(zip(names, group["params"]))
            settings = {name: value for name, value in group.items() if name != "param_names"}
            optimizer.add_param_group({**settings, "params": params})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """The unsharded `state_dict` of the optimizer, on the ranks and in the way of `full_parameters`."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads this rank's shard of an unsharded `state_dict`, saved at any world size.

        Raises:
            ValueError: the state has other groups of parameters than the optimizer.
        """
        load_optimizer(optimizer, state)


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, with every entry laid out in memory as its parameter.

    torch's fused optimizers use memory addresses: with a channels_last parameter, a contiguous momentum would silently be
    applied to other elements.
    """
    optimizer.load_state_dict(state)
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):
            continue  # some optimizers keep a count of their own there
        for name, value in entries.items():
            shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if shaped and value.stride() != parameter.stride():
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
    """A forward pass inside leaves no trace in the model's buffers and in the generators."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers):
            buffer.copy_(before)


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` comes from `torch.compile`; asks without loading the compiler."""
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
    """The parameters that require gradients, last layers first: about the order in which backward reaches them."""
    return [parameter for parameter in reversed(list(model.parameters())) if parameter.requires_grad]


def placed(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A view of a piece of a vector with the parameter's shape and strides: channels_last weights get gradients of the same layout. A
    parameter with gaps in memory, such as a slice of columns, gets one without."""
    like = parameter if parameter.is_contiguous() else torch.empty_like(parameter, device="meta")
    return piece.as_strided(parameter.shape, like.stride(), piece.storage_offset())


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-d view of a tensor without gaps, in the order in which its elements lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def stands_for_none(firsts: torch.Tensor) -> torch.Tensor:
    """Whether no rank has a gradient, for each first element of a sum: it is -0.0 then (`buckets.py`)."""
    return (firsts.real == 0) & firsts.real.signbit()


def refuse_recording(parameter: torch.Tensor, problem: str) -> None:
    """Raises `RuntimeError` while a CUDA graph is recorded."""
    if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(problem)


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


Mark: TypeAlias = "float | torch.cuda.Event"
"""A point in time: seconds of the host, or an event in the GPU's stream."""


def mark(device: torch.device) -> Mark:
    """This point of the rank's work, to be handed to a `StepClock` later."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def on_grad(parameter: torch.Tensor, method: Callable[[Any], None]) -> None:
    """Calls `method(parameter)` as soon as autograd has the parameter's gradient, while the method's object lives.

    Python's garbage collector does not see a tensor's hooks. Held through them, a strategy and its model would keep each
    other for ever, and with them a process group that was destroyed.
    """
    weak = weakref.WeakMethod(method)

    def hook(ready: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(ready)

    parameter.register_post_accumulate_grad_hook(hook)


def hooks_of(model: nn.Module) -> Iterator[tuple[int, str, bool, Any]]:
    """Yields each hook on a parameter: its number, the parameter's name, whether it is for an accumulated gradient, and the function.
    No other hook of the process gets the number."""
    for name, parameter in model.named_parameters():
        for after, hooks in enumerate((parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
            for number, hook in (hooks or {}).items():
                yield number, name, bool(after), hook


def hooks_of_script(model: nn.Module, of_strategy: Container[int] = ()) -> Iterator[tuple[str, bool]]:
    """The parameters with a hook that neither torch nor we nor the strategy have registered, and whether it is one for an accumulated
    gradient."""
    for number, name, after, hook in hooks_of(model):
        if number not in of_strategy and not is_ours(hook):
            yield name, after


def is_ours(hook: Any) -> bool:
    """Whether torch or we have written the function."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return (getattr(hook, "__module__", None) or "").startswith(("torch.", "lockstep."))


def is_nested_backward() -> bool:
    """Whether a backward pass that a layer runs inside of another one has called this hook."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
    return False


class GradientWatch:
    """When all of this rank's own gradients had come, and where it waited for other ranks before that.

    For strategies that wait for the other ranks inside the forward or the backward pass.
    With any other strategy the own gradients are complete when `synchronize` is called.

    Args:
        unused: some gradients may not come at all. Then the own part ends with the backward pass.
    """

    def __init__(self, world: World, unused: bool = False) -> None:
        self._world, self._unused = world, unused
        self._hooked: set[torch.Tensor] = set()
        self._queued = False
        self.missing: set[torch.Tensor] = set()
        """Parameters whose gradient has not come yet in this pass."""
        self.announced: set[torch.Tensor] | None = None
        """Parameters whose next gradient a forward pass has announced to what sums it; None: nothing is to be announced now."""
        self.past: list[torch.Tensor] = []
        """The parameters whose gradient came first in a backward pass that nothing had announced."""
        self._is_past = False
        self.clear()

    def clear(self) -> None:
        """Forgets what was noted of this step."""
        self.complete: Mark | None = None
        """When the last own gradient came."""
        self.waits: list[tuple[Mark, Mark]] = []
        """Waits for other ranks, from … to …, before that."""
        self._waits_since: list[tuple[Mark, Mark]] = []
        """Those since then: of no interest, unless a further pass follows."""

    def expect(self, parameters: Iterable[torch.Tensor]) -> None:
        """A pass begins that gives each of these a gradient."""
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
            elif not self._is_past:
                self._is_past = True
                self.past.append(parameter)
                torch.autograd.Variable._execution_engine.queue_callback(self._past_ends)
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

    def _past_ends(self) -> None:
        self._is_past = False

    def now(self) -> Mark:
        return mark(self._world.device)

    def waited(self, since: Mark) -> None:
        """The rank has waited for other ranks since then. It counts where own gradients come after it."""
        self._waits_since.append((since, mark(self._world.device)))
