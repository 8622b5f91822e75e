"""What the variables of a script lead to, and what its models, optimizers and hooks hold besides their state: attributes and items."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import queue
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from .. import generators
from ..checkpoint.state import TrainState
from ..parallel.names import plain, plain_name
from ..parallel.names import unwrapped as network_of
from .bytecode import (
    PLAIN,
    Kind,
    code_of,
    has_no_parameter,
    has_parameters,
    innermost,
    kind_of,
    returns,
    set_anew,
    spaces,
    unwrapped,
    uses,
)
from .proof import OF_TORCH
from .undo import codes_of, is_of_script, root_of

MOST, LEVELS, DEPTH, ITEMS = 5000, 8, 4, 100
"""Limits: objects to inspect, levels of the script's objects below a variable, levels of other objects and of lists and dictionaries, items
at each end of a list or dictionary."""
SEQUENCES = (list, tuple, deque)
_LEAVES = (*PLAIN, float, torch.Tensor)
VALUES = (*_LEAVES, np.ndarray, dict, set, frozenset, *SEQUENCES)
"""Types whose objects are compared by their values, whatever their names are."""
_SET_BY_TORCH = ("_zero_grad_profile_name", "_opt_called", "_step_count")
_OF_OPTIMIZER = {*torch.optim.Optimizer.__init__.__code__.co_names, *_SET_BY_TORCH, "step", "add_param_group", "sync"}
"""Attributes of optimizers that belong to torch or Lockstep: names in the constructor, as a first optimizer imports torch's compiler."""
_OF_DATA = (Dataset, Sampler, DataLoader)
_SCHEDULE = torch.optim.lr_scheduler.LRScheduler
_HOLDERS = (argparse.Namespace, types.SimpleNamespace, functools.partial, types.MethodType, queue.Queue, ContextVar)
"""Types of Python whose contents a script sets."""
_STATES = (int, float, str, tuple, torch.Tensor, np.ndarray)
"""Types of attributes that `_states_of` returns. A pass may fill a list or dictionary, for a plot or an extra loss."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks",
          "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # fmt: skip
"""Attributes of modules, parameters and optimizers with their hooks."""


@dataclass(frozen=True, slots=True)
class Same:
    """In place of an object to which another name leads, too."""

    of: int
    """The identity of the object."""
    name: str = ""
    """Its first name, where that is known."""


class Reached(NamedTuple):
    """A value that a variable of the script leads to."""

    name: str
    value: Any
    is_own: bool
    """Whether the script names the value: a variable, or an attribute of an object, a class or a module of the script."""
    is_part: bool
    """Whether the value is an item of a list or dictionary that the script names, which is compared as a whole."""


def reached(
    state: TrainState | None, of: Collection[types.CodeType] = (), bound: Collection[tuple[str, int]] | None = None
) -> list[Reached]:
    """Returns the values of the running functions' variables, with the attributes and items below them. Leaves out the content of kept
    objects, since a state may consist of copies, and the generators of the process. Returns nothing if an object of the script raises,
    since all this only serves warnings.

    Args:
        of: the functions; (): all.
        bound: (name, identity) of the variables where the loop begins. What others lead to, such as the target of `for`, has the names of
            these, if they lead to it, too. None: all are bound.
    """
    named = ((name, value) for names in spaces(of) for name, value in names.items() if name != "_" and name[:2] != "__")
    of_optimizers = (
        (f"{name}.{key}", value)
        for name, optimizer in ({} if state is None else state.optimizers).items()
        for key, value in vars(optimizer).items()
        if key not in _OF_OPTIMIZER and is_of_script(root_of(optimizer))
    )
    with contextlib.suppress(Exception):  # a property, or a subclass of a tensor or a dictionary, may raise anything
        lasting, others = list[tuple[str, Any]](), list[tuple[str, Any]]()
        for name, value in named:
            (lasting if bound is None or (name, id(value)) in bound else others).append((name, value))
        return list(_below([*lasting, *of_optimizers], [] if state is None else _known(state), others))
    return []


def _known(state: TrainState) -> list[Any]:
    """Returns the values that a checkpoint restores."""
    kept = state.user_state
    things = [*state.optimizers.items(), *kept.objects.items(), *kept.rank_objects.items()]
    inside = [
        (name, [thing.state, thing.param_groups] if isinstance(thing, torch.optim.Optimizer) else thing)
        for name, thing in things
        if not isinstance(thing, _SCHEDULE)  # it has an optimizer that need not be kept
    ]
    drawn = [*kept.generators.values(), *generators.of_process(state.world.device).values()]
    return drawn + [value for _, value, *_ in _below(inside, [])]


def _below(
    named: Iterable[tuple[str, Any]], known: list[Any], others: Iterable[tuple[str, Any]] = ()
) -> Iterator[Reached]:
    """Yields these values, and the attributes and items below them, without the known ones; then `others`, and those below them."""
    late = deque((Reached(name, value, True, False), LEVELS) for name, value in others)
    waiting = deque((Reached(name, value, True, False), LEVELS) for name, value in named)
    seen: dict[int, Any] = {id(value): value for value in known}
    restored = {*seen}
    while (waiting or late) and len(seen) < MOST:
        one, left = (waiting or late).popleft()
        name, value, is_own, is_part = one
        if issubclass(type(value), types.MethodWrapperType):  # such as a generator's `__next__`
            value, one = value.__self__, one._replace(value=value.__self__)
        kind = type(value)
        if issubclass(kind, _LEAVES):
            if is_own or issubclass(kind, torch.Tensor):
                yield one
            continue
        if id(value) in seen or kind.__module__.startswith("lockstep."):
            if is_own and id(value) in seen:  # several variables may have one function, list or object
                is_value = issubclass(kind, VALUES)
                about = kind_of(value)
                if about is not None or (is_value and id(value) not in restored):
                    yield one
                if not is_value and (about is None or issubclass(kind, nn.Module)):
                    yield one._replace(value=Same(id(value)))
            if kind.__name__ == "Session" and left:
                waiting.append((Reached(f"{name}.config", getattr(value, "config", None), True, False), left - 1))
            continue
        of_script = is_of_script(root_of(unwrapped(value)))
        if issubclass(kind, (types.ModuleType, type)) and not of_script:
            continue
        seen[id(value)] = value
        yield one
        # A module without parameters may be a loss function with settings.
        is_open = issubclass(kind, nn.Module) and has_no_parameter(value)
        if not left or issubclass(kind, torch.optim.Optimizer) or (issubclass(kind, nn.Module) and not is_open):
            continue
        holds = issubclass(kind, (dict, list, tuple)) or (issubclass(kind, deque) and (is_own or is_part))
        # A quasi-random sequence, such as scipy's Halton, counts its points.
        is_sequence = hasattr(kind, "fast_forward")
        names = not holds and (of_script or is_open or is_sequence or issubclass(kind, (*_HOLDERS, *_OF_DATA)))
        parts = holds and (is_own or is_part)
        left = (left if names or parts else min(left, DEPTH)) - 1
        waiting.extend((Reached(inner, item, names, parts), left) for inner, item in _inside(name, value, parts))


def _inside(name: str, value: Any, is_part: bool) -> list[tuple[str, Any]]:
    """Returns the items or attributes of a value, or what a function is bound to, with their names.

    Args:
        is_part: whether the script names a dictionary or what holds it. A library's may be a cache, so keys that are no text do not count.
    """
    if issubclass(type(value), types.FunctionType):
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = zip(reversed(names), reversed(value.__defaults__ or ()))
        own = [(f"{name}.{inner}", item) for inner, item in (*defaults, *vars(value).items())]
        return [*_cells(name, value), *own, *_globals_of(value)]
    if issubclass(type(value), types.MethodType):
        return [(f"{name}.__self__", value.__self__), (f"{name}.__func__", value.__func__)]
    if issubclass(type(value), ContextVar):
        return [(f"{name}.get()", value.get(None))]
    if issubclass(type(value), dict):
        plain_keys = (str, int)
        return [
            (f"{name}[{key!r}]" if type(key) in plain_keys else f"{name}.values()[{at}]", item)
            for at, (key, item) in enumerate([*itertools.islice(dict.items(value), ITEMS)])
            if is_part or type(key) in plain_keys
        ]
    if issubclass(type(value), SEQUENCES):
        items = [*itertools.islice(value, ITEMS)]  # at once: a thread may fill a deque
        return [(f"{name}[{at}]", item) for at, item in enumerate(items)]
    attributes: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):  # a proxy may compute it
        attributes |= vars(value) if issubclass(type(value), type) else object.__getattribute__(value, "__dict__")
    for kind in type(value).__mro__:
        for slot, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType:
                with contextlib.suppress(AttributeError):  # it has no value yet
                    attributes[slot] = member.__get__(value)
            elif type(member) in (bool, int, float):  # the value of an object that has none
                attributes.setdefault(slot, member)
    of_torch = OF_TORCH if issubclass(type(value), nn.Module) else ()
    is_library = issubclass(type(value), (*_OF_DATA, nn.Module)) and not is_of_script(root_of(value))
    if is_library:  # a script sets a sampler's epoch anew
        attributes = {key: item for key, item in attributes.items() if key[0] != "_" and key != "epoch"}
    return [(f"{name}.{key}", item) for key, item in attributes.items() if key[:2] != "__" and key not in of_torch]


def _cells(path: str, function: Any) -> list[tuple[str, Any]]:
    """Returns the variables of outer functions that a function reads or sets."""
    if type(function) is not types.FunctionType:
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())  # a cell may be empty
    return [(f"{path}.{name}", item) for name, cell in cells for item in gc.get_referents(cell)]


def _globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Returns the global variables that a function of a module of the script reads, by the module's name."""
    module, space = function.__module__, function.__globals__
    if module == "__main__" or not is_of_script(root_of(function)):
        return []  # `frames` has those of the running functions
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    prefix = f"{module}." if module else ""  # a text that the script executes is in no module
    return [(f"{prefix}{name}", space[name]) for name in sorted(names & space.keys())]


def in_models(state: TrainState, others: Iterable[Reached]) -> Iterator[Reached]:
    """Yields the state in plain attributes of modules, their parameters and hooks, of optimizers and of kept objects: numbers, texts,
    tensors, arrays and objects of the script, and what is below these. An attribute that each pass sets before it reads it, such as the
    last activations, is no state.

    Args:
        others: values of the script. Of these it reads modules with parameters, as it reads the model.
    """
    named = [(plain_name(state.model, name.lstrip(".")), value) for name, value in _in_modules(state.model)]
    inside = {id(module) for model in state.models for module in model.modules()}
    kept = [*state.user_state.objects.items(), *state.user_state.rank_objects.items()]
    holders = [(name, value) for name, value, *_ in others if has_parameters(value)] + kept
    for name, holder in holders:
        if issubclass(type(holder), nn.Module):
            of_modules = _in_modules(network_of(holder), inside)
            named += [(f"{name}.{inner.lstrip('.')}", value) for inner, value in of_modules]
        elif is_of_script(root_of(holder)) and not (issubclass(type(holder), _SCHEDULE) or hasattr(holder, "__iter__")):
            named += _states_of(name, holder)  # not of a loader, which may load its state only as it begins
    for name, optimizer in state.optimizers.items():
        # `reached` has those of the script's optimizers.
        named += [] if is_of_script(root_of(optimizer)) else _states_of(name, optimizer, _OF_OPTIMIZER)
        named += [variable for hook in _hooks_of(optimizer) for variable in _of_hook(name, hook)]
    yield from _below([(f"attribute {name}", value) for name, value in named], [one for _, one in kept])


def _in_modules(model: nn.Module, without: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yields the names and values in the modules of a model, without the modules of these identities."""
    for path, module in ((path, one) for path, one in model.named_modules() if id(one) not in without):
        is_private = not is_of_script(root_of(module))
        # Pruning keeps `weight_orig`, and each pass computes the attribute `weight`.
        pruned = {key.removesuffix("_orig") for key in module._parameters}
        states = _states_of(path, module, {*OF_TORCH, *pruned})
        yield from ((name, value) for name, value in states if not (is_private and name[len(path) + 1] == "_"))
        for key, parameter in module._parameters.items():
            yield from [] if parameter is None else _states_of(f"{path}.{key}", parameter)
        for hook in _hooks_of(module):
            holder = hook.__self__ if issubclass(type(hook), types.MethodType) else hook
            code = code_of(hook) or code_of(type(hook).__call__)
            if code is not None and returns(code):  # another one collects
                yield from _states_of(f"{path}.{type(holder).__name__}", holder, OF_TORCH)
                yield from _of_hook(path, hook)


def _of_hook(path: str, hook: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables of outer functions that a hook uses. It may add to a list, for a plot."""
    for name, value in _cells(path, hook):
        collects = not issubclass(type(value), (int, float, torch.Tensor)) and not generators.is_generator(value)
        if uses(code_of(hook), name.rpartition(".")[2], collects):
            yield name, value


def _hooks_of(holder: Any) -> list[Any]:
    """Returns the script's hooks of a module, a parameter or an optimizer."""
    hooks = (hook for name in _HOOKS for hook in (getattr(holder, name, None) or {}).values())
    return [hook for hook in hooks if is_of_script(root_of(unwrapped(innermost(hook))))]


def built(state: TrainState) -> Iterator[Reached]:
    """Yields the class of each module of the model, and the script's hooks of modules, parameters and optimizers, as texts."""
    model, optimizers = state.model, state.optimizers
    named = [(f"module {plain_name(model, path)}" if path else "model", one) for path, one in model.named_modules()]
    named += [(f"parameter {name}", one) for name, one in plain(model, dict(model.named_parameters())).items()]
    for name, holder in (*named, *optimizers.items()):
        attributes = {} if isinstance(holder, torch.optim.Optimizer) else getattr(holder, "__dict__", {})
        kind: Any = type(holder)
        lasting = [value for key, value in attributes.items() if key not in set_anew(kind)]
        own = [value for value in lasting if is_of_script(root_of(holder)) or is_of_script(root_of(value))]
        kinds = [kind_of(value) for value in (kind, *own, *_hooks_of(holder))]
        text = "; ".join(filter(None, kinds))
        yield Reached(f"{name} (class, functions or hooks)", Kind(text), True, False)


def _states_of(path: str, holder: Any, without: Collection[str] = ()) -> list[tuple[str, Any]]:
    """Returns the attributes of a module, a parameter, a hook or an optimizer that may be a state."""
    kind: Any = type(holder)
    without = {*without, *set_anew(kind)}
    return [
        (f"{path}.{key}", value)
        for key, value in getattr(holder, "__dict__", {}).items()
        if key not in without
        and not issubclass(type(value), nn.Module)
        and (issubclass(type(value), _STATES) or is_of_script(root_of(value)))
    ]
