"""The model of a run, as the script wrote it and as the strategy wrapped it, and its optimizers. The ranks compare the buffers and the
modes that its steps leave."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .. import sync as strategies
from ..checkpoint.state import averaged_buffers, check_extra_state, parameter_names
from ..config import Sync
from ..contract import UserError, named
from ..optim.ema import Ema
from ..parallel.exchange import all_gather_trees
from ..parallel.names import unwrapped
from ..parallel.packing import storage, storages
from ..parallel.world import World
from ..resilience.closeness import BATCH_STATISTICS, ReplicasDiffer, check_same, differing_ranks, sums_of_bits
from ..sync.base import BuildOptimizer, GradientSync, hooks_of, hooks_of_script, trains_another
from .proof import attributes_of
from .variables import is_table

_DERIVED = ("_orig", "_g", "_v")
"""Endings of a parametrization's parameters, from which each pass computes the attribute."""


class Several(GradientSync):
    """The strategies of several models as one. In a step only those work whose models learn.

    `model` holds the models by their names.
    """

    def __init__(self, parts: dict[str, GradientSync]) -> None:
        self.parts = self.learning = list(parts.values())
        self.model = nn.ModuleDict({name: part.model for name, part in parts.items()})
        first = self.parts[0]
        self.settings, self.options, self.world = first.settings, first.options, first.world
        self.averages_gradients, self.batch_parts = first.averages_gradients, first.batch_parts

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]
        return sum(part.bytes_sent for part in self.parts)

    @property
    def watch(self) -> Any:  # type: ignore[override]
        return self.learning[0].watch

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        raise NotImplementedError("each part wraps its own model")

    @contextlib.contextmanager
    def step_of(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> Iterator[None]:
        """Makes the models of these optimizers learn in the block. The others are part of the loss, but get no gradient and send none."""
        stepping = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self.learning = [part for part in self.parts if any(p in stepping for p in part.model.parameters())]
        resting = [part for part in self.parts if part not in self.learning]
        frozen = [p for part in resting for p in part.model.parameters() if p.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            with contextlib.ExitStack() as stack:
                for part in resting:
                    stack.enter_context(part.accumulate())
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self.learning = self.parts

    def zero_grad(self) -> None:
        for part in self.learning:
            part.zero_grad()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part in self.learning:
                stack.enter_context(part.accumulate())
            yield

    def synchronize(self) -> None:
        for part in self.learning:
            part.synchronize()

    def gradients(self, parameters: Any = None) -> list[torch.Tensor]:
        return [gradient for part in self.learning for gradient in part.gradients(parameters)]


class Replica:
    """The models of a run: one, or several that are trained in turn or together.

    `model`, `network` and `sync` are those of the one model. Of several, `model` holds them by their names.
    """

    def __init__(self, settings: Sync, world: World) -> None:
        self._settings, self._world = settings, world
        self._parts: dict[str, GradientSync] = {}
        self.networks: dict[str, nn.Module] = {}
        """The networks that a script calls, by the models' names."""
        self.made: list[Any] = []
        """The tables of the models at replication, for `Unsaved.compare_tables`. `Loop.begin` clears the list."""
        self.hooks: set[int] = set()
        """The numbers of the hooks that the strategies have registered (`hooks_of`)."""
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.ema: Ema | None = None
        self._sizes: list[int] = []
        """Parameters in each group of the optimizers, whose names `check_groups` has looked up."""
        self.model: nn.Module
        self.network: nn.Module
        self.sync: GradientSync

    def add(self, model: nn.Module, example: Any, name: str) -> nn.Module:
        """Returns the network to call, on the rank's device, with rank 0's weights. Collective.

        Raises:
            UserError: the strategy does not support the model, or does not support several.
            ValueError: the name is taken, or two models share a parameter.
            RuntimeError: an optimizer exists already.
            TypeError: no checkpoint can hold the extra state of a module, or a module is TorchScript.
        """
        if name in self._parts:
            raise ValueError(
                f'replicate() was called twice with the name "{name}": give the second model another, replicate(model, name="…")'
            )
        if {*model.parameters()} & {p for part in self._parts.values() for p in part.model.parameters()}:
            raise ValueError(
                f"replicate({name}) has parameters of a model that was replicated before, and they would be summed twice: "
                "replicate one module that holds both"
            )
        if self.optimizers:
            raise RuntimeError("replicate() comes before optimizer(): replicate all models first")
        strategy = strategies.build(self._settings)
        has_state = strategy.has_memory or type(strategy).state_dict is not GradientSync.state_dict
        has_parts = strategy.shards_gradients or not strategy.is_replicated
        if self._parts and (strategy.one_model or has_parts or has_state):
            raise strategy.refuse(
                "takes one model: several would lose its state, or a rank's part of it",
                "use sync.name=flat or ddp for several, or replicate one module that holds them",
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise TypeError(
                "replicate() takes modules of Python, and TorchScript has its own: replicate the module as it was before "
                "torch.jit.script or torch.jit.trace, and make TorchScript of the trained one"
            )
        check_extra_state(model)
        model.to(self._world.device)
        of_script = {hook for hook, *_ in hooks_of(model)}
        self.made += [value for _, value in tables_of(model)]
        self.network = self.networks[name] = strategy.wrap(model, self._world, example)
        self.hooks |= {hook for hook, *_ in hooks_of(strategy.model)} - of_script
        self._parts[name] = strategy
        self.sync = strategy if len(self._parts) == 1 else Several(self._parts)
        self.model = self.sync.model
        return self.network

    def _part_of(self, network: nn.Module | None) -> str | None:
        """Returns the name of the model that `network` is, in its original, wrapped or compiled form; None: it is no model of the run."""
        inner = None if network is None else unwrapped(network)
        names = (
            name
            for name, part in self._parts.items()
            if network is self.networks[name] or inner in (self.networks[name], unwrapped(part.model))
        )
        return next(names, None)

    def add_optimizer(self, build: BuildOptimizer, name: str, network: nn.Module | None) -> torch.optim.Optimizer:
        """Makes an optimizer over the parameters of `network`, by default of all models. Returns it.

        Raises:
            TypeError: `build` is no function.
            ValueError: the name is taken, or `network` is not replicated.
            UserError: the strategy takes one optimizer.
        """
        if not callable(build):
            raise TypeError(
                f"optimizer() takes a function that makes the optimizer, got a {type(build).__name__}: "
                "run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))"
            )
        if name in self.optimizers:
            raise ValueError(f"optimizer({name}) was called twice with this name: give the second one another name")
        if self.optimizers and self.sync.one_optimizer:
            raise self.sync.refuse("takes one optimizer", "use sync.name=flat or ddp for several")
        part = self._part_of(network)
        if network is not None and part is None:
            raise ValueError(
                f"optimizer(model=…) takes a network that replicate() returned; got a {type(network).__name__}"
            )
        optimizer = (self.sync if part is None else self._parts[part]).make_optimizer(build)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise UserError(
                f"{type(optimizer).__name__} computes the loss several times in a step, and run.step() computes it once: take an optimizer "
                "whose step() needs no closure"
            )
        self.optimizers[name] = optimizer
        return optimizer

    @functools.cached_property
    def together(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, for a step that names none. Raises `ValueError` where two of them move one parameter."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        movers: dict[torch.Tensor, str] = {}
        for name, optimizer in self.optimizers.items():
            for parameter in itertools.chain.from_iterable(self.sync.parameter_groups(optimizer)):
                other = movers.setdefault(parameter, name)
                if other != name:
                    raise ValueError(
                        f'two optimizers, "{other}" and "{name}", would move {names.get(parameter, "one parameter")} in the same step: '
                        "give each its own parameters, or name those that step, run.step(…, optimizer=[…])"
                    )
        return tuple(self.optimizers.values())

    def check_groups(self) -> None:
        """Raises `ValueError` for a parameter of an optimizer that no checkpoint would hold. Looks only at groups whose sizes are new."""
        sizes = [len(group["params"]) for _, group in named_groups(self.optimizers)]
        if sizes != self._sizes:
            for name, optimizer in self.optimizers.items():
                parameter_names(self.sync, optimizer, name)
            self._sizes = sizes

    def known(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> tuple[torch.optim.Optimizer, ...]:
        """Returns the given optimizers, by default all. Raises `ValueError` for an optimizer that no checkpoint would hold, and if all
        would move a parameter twice."""
        if not {*map(id, optimizers)} <= {*map(id, self.optimizers.values())}:
            raise ValueError("a step takes optimizers that run.optimizer() returned: the state of no other is saved")
        return optimizers or self.together

    def parameters_of(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> set[torch.Tensor] | None:
        """Returns the parameters of these optimizers, whose gradients make the step; None: all trained parameters.

        Other gradients belong to no step, for example those of a second network that the loss has passed through.
        """
        groups = itertools.chain.from_iterable(map(self.sync.parameter_groups, optimizers))
        of = list(itertools.chain.from_iterable(groups))
        ids = set(map(id, of))  # a tensor's own hash is a function in Python
        return set(of) if trains_another(self.model, ids) else None

    def averaged(self, decay: float, every: int) -> None:
        if not 0 < decay < 1 or every < 1:
            raise ValueError(f"average() takes a decay in (0, 1) and every from 1, got {decay} and {every}")
        self.ema = Ema(self.model, decay, every, self.sync.duplicate())

    def hook_before_sum(self) -> str | None:
        """Returns the name of a parameter with a hook of the script that gets the gradient of a part of the batch, before the sum.

        Raises:
            UserError: a hook is called too early to use a gradient, or never.
        """
        sync, before = self.sync, None
        for name, after in hooks_of_script(sync.model, self.hooks):
            if after and sync.is_replicated:
                raise sync.refuse(
                    f"sums the gradient of {name} over the ranks after the hook that register_post_accumulate_grad_hook() has set",
                    "use the gradient between run.backward() and run.update()",
                )
            if not after and not sync.is_replicated:
                raise sync.refuse(
                    f"calls no hook that register_hook() has set, and {name} has one",
                    "change the gradient between run.backward() and run.update(), or use sync.name=flat",
                )
            before = before or (None if after else name)
        return before

    def training(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a step of these optimizers is computed."""
        return self.sync.step_of(optimizers) if isinstance(self.sync, Several) else contextlib.nullcontext()

    @torch.no_grad()
    def for_evaluation(self, network: nn.Module | None) -> nn.Module:
        """Returns a copy with full weights (their average, if there is one) and mean batch statistics, in evaluation mode. Collective.

        Raises:
            ValueError: there are several models, and `network` is none of them.
        """
        source = self.ema.average if self.ema else self.model
        if isinstance(self.sync, Several):
            name = self._part_of(network)
            if name is None:
                raise ValueError("for_evaluation(model) takes one of the networks that replicate() returned")
            source = source[name]  # type: ignore[index]
        model = self.sync.full_module(source)
        # Under `exact` they are the same on all ranks, and a mean could round.
        alike = self.sync.batch_parts is not None
        buffers = dict(model.named_buffers()) if alike else averaged_buffers(model, self._world)
        model = copy.deepcopy(model) if model is source else model
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        return model.eval()


class Modes:
    """Record of the modules in training mode and of the parameters that require a gradient, in the last two steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules, self._parameters = dict(model.named_modules()), dict(model.named_parameters())
        self.last = self._earlier = b""
        self._held: bytes | None = None

    def end(self) -> None:
        """Records the modes at the end of a step."""
        self._earlier, self.last = self.last, self._now()
        self._held = self.last

    def hold(self) -> None:
        """Holds the present modes as those of the next step. Until `release` the script may set others, to evaluate."""
        self._held = self._now()

    def release(self) -> None:
        """Ends `hold`: the script's modes are those of the next step."""
        self._held = None

    def _now(self) -> bytes:
        return bytes([module.training for module in self._modules.values()]) + self._trained()

    def _trained(self) -> bytes:
        return bytes([parameter.requires_grad for parameter in self._parameters.values()])

    @property
    def any_training(self) -> bool:
        """Whether any module was in training mode in the last step."""
        return any(self.last[: len(self._modules)])

    def find(self) -> None:
        """Reads the lists of modules and parameters again: the script may have replaced a layer."""
        modules, before = dict(self._model.named_modules()), self._modules
        parameters = dict(self._model.named_parameters())
        if modules != before or [*map(id, parameters.values())] != [*map(id, self._parameters.values())]:
            self._modules, self._parameters = modules, parameters
            self.last = self._earlier = self._carried(before, self.last)
            self._held = None if self._held is None else self._carried(before, self._held)

    def _carried(self, before: Mapping[str, nn.Module], modes: bytes) -> bytes:
        """Returns the recorded modes of the model's present modules, and whether each present parameter requires a gradient."""
        known = dict(zip(before.values(), modes))
        return bytes([known.get(module, module.training) for module in self._modules.values()]) + self._trained()

    def evaluating(self) -> list[str]:
        """Returns the modules that are in evaluation mode in the next step."""
        modes = self._now() if self._held is None else self._held
        return [name for name, is_training in zip(self._modules, modes) if not is_training]

    def check(self, world: World) -> None:
        """Raises `ReplicasDiffer` on all ranks if a mode, or `requires_grad`, differs between ranks. Collective."""
        for modes in (self._earlier, self.last):  # the comparison may be a step old
            names = {name or "the model": mode for name, mode in zip(self._modules, modes)}
            said = {name: f"{'training' if mode else 'evaluation'} mode" for name, mode in names.items()}
            trained = zip(self._parameters, modes[len(self._modules) :])
            check_same({**said, **{name: f"requires_grad={bool(mode)}" for name, mode in trained}}, world)


class Buffers:
    """Comparison of the buffers that are the same on all ranks: those that no step changes, such as a table, or all. A buffer that no
    `state_dict` holds, such as a cache, may differ.

    Args:
        alike: whether all buffers are the same on all ranks, batch statistics too.
    """

    def __init__(self, model: nn.Module, world: World, alike: bool) -> None:
        self._model, self._world, self._alike = model, world, alike
        self._moved: set[str] = set()
        self.find()
        self.begin()

    def find(self) -> None:
        """Reads the list of buffers again: the script may have replaced a layer."""
        self._places = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in self._model.named_modules()
            for name in module._buffers
            if self._alike or (name not in BATCH_STATISTICS and name not in module._non_persistent_buffers_set)
        ]

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for buffer_name, module, name in self._places:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.layout is torch.strided and not buffer.is_inference():
                yield buffer_name, buffer

    def begin(self) -> None:
        """Notes the versions of the buffers, as a step or its batch begins."""
        tensors = () if self._alike or self._world.size == 1 else self._tensors()  # no comparison needs the others
        self._before = {name: (buffer, buffer._version) for name, buffer in tensors if name not in self._moved}

    def end(self) -> None:
        """Leaves out the buffers that the step has changed."""
        before = self._before
        self.begin()
        for name, (tensor, version) in self._before.items():
            was, at = before.get(name, (None, version))
            if tensor is not was or version != at:
                self._moved.add(name)

    def check(self) -> list[str]:
        """Returns the buffers that differ because steps have changed them, or that a rank lacks. Raises `ReplicasDiffer` on all ranks if
        another buffer differs. Collective."""
        world = self._world
        if world.size == 1:
            return []
        tensors = dict(self._tensors())
        sums = dict(zip(tensors, sums_of_bits(tensors.values()).tolist()))
        of_ranks = all_gather_trees([sums, sorted(self._moved)], world)
        apart = differing_ranks([sums for sums, _ in of_ranks])
        for name, ranks in apart.items():
            if not any(name in moved or name not in sums for sums, moved in of_ranks):
                raise ReplicasDiffer(f"the buffer {name} on rank {named(ranks)} differs from rank 0's")
        return [*apart]


def named_groups(optimizers: Mapping[str, torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each optimizer's groups of parameters, with their names in messages and checkpoints."""
    for name, optimizer in optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            yield f"{name}.param_groups[{index}]", group


def learning_rates(optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, float]:
    """Returns the learning rate of each group of parameters. A rate in a tensor is left out: to read it may wait for the device."""
    groups = named_groups(optimizers)
    return {name: float(group["lr"]) for name, group in groups if isinstance(group.get("lr"), (int, float))}


def kept_buffers(model: nn.Module) -> list[torch.Tensor]:
    """Returns copies of the buffers, batch statistics included, which a forward pass changes."""
    return [buffer.clone() for buffer in model.buffers()]


@torch.no_grad()
def put_back(model: nn.Module, before: list[torch.Tensor]) -> None:
    """Restores the buffers from `kept_buffers`. Does nothing for an empty list."""
    if before:
        for buffer, kept in zip(model.buffers(), before, strict=True):
            buffer.copy_(kept)


def tables_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the tables in plain attributes of modules, by name: tensors and arrays, such as random features, and long lists of whole
    numbers, such as a permutation. A tensor that shares the memory of a parameter or buffer is no table.

    `replicate` sends parameters and buffers only, and a checkpoint holds only these. So a random table must be the same on each rank
    and at each start.
    """
    own = storages([*model.parameters(), *model.buffers()])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in attributes_of(model):
        if any(f"{name}{ending}" in parameters for ending in _DERIVED):
            continue
        if is_table(value) and not (isinstance(value, torch.Tensor) and (value.requires_grad or storage(value) in own)):
            yield name, value
