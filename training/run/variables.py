"""The variables of a script: their values at a save, and in the start that resumes from it.

A checkpoint holds a digest of each variable that has changed since the start: of a counter, a list, an average, a copy of the weights. The
start that resumes names those that have another value there. A variable that the loop itself makes, such as a batch, does not exist yet
where a start resumes, so it is not named. What a script draws before its session without a seed is another thing in each process: the
ranks, and the starts, compare it (`tables`).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import io
import itertools
import mmap
import operator
import re
import sys
import time
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdRef

from .. import generators
from ..checkpoint.state import TrainState
from ..parallel.packing import storage, storages
from ..resilience.closeness import sums_of_bits
from .proof import OF_TORCH, has_bytes
from .undo import codes_of, is_of_script, root_of

MOST, DEPTH, ITEMS = 5000, 3, 100
"""Limits: objects to inspect, levels below a variable, items at each end of a list or dictionary."""
LIST = "list"
"""The beginning of the shape of a list in `tables`."""
SHORT = 16
"""A list of at most so many whole numbers is no table: ranks may have different ones, such as their experts or groups."""
_SAMPLE = 1 << 16
"""Numbers of a tensor or an array that a digest reads, evenly spaced, or the first ones of each dimension (`beginning`)."""
_PLAIN = (type(None), bool, int, str, bytes)
_OF_OPTIMIZER = ("state", "param_groups", "defaults")
"""Attributes of an optimizer that a checkpoint restores, or its constructor sets."""
_SEQUENCES = (list, tuple, deque)
_COUNTING = (enumerate, zip, map, itertools.islice)
_ITERATOR = "an iterator"
"""The digest of any iterator, whose position cannot be seen. It begins anew in each start."""
_BEGAN = time.time(), time.perf_counter(), time.monotonic()


class Mark(NamedTuple):
    """A tensor or a generator at one moment. A mark keeps no tensor alive."""

    made: Any
    """The tensor, weakly; or the generator and its seed. Another value: it was made, or seeded, anew."""
    state: Any
    """The number of changes in place; or the state of the generator."""


class Reached(NamedTuple):
    """A value that a variable of the script leads to."""

    name: str
    value: Any
    is_own: bool
    """Whether the script names the value: a variable, or an attribute of an object, a class or a module of the script."""


class Variables:
    """The variables of the script in one attempt, on one rank."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._start = {name: mark for name, _, mark in self._marks(_held(state))}

    def changed(self, samples: int) -> Iterator[tuple[str, str, bool]]:
        """Yields (name, digest, whether to compare it between ranks) of each iterator, and of each variable that has changed since the
        start of the attempt. Compared are numbers, tensors and arrays that were there when the loop began, but no batch.

        Args:
            samples: as many entries as a tensor of the rank's last batch has.
        """
        held = _held(self._state)
        for name, value, mark in self._marks(held):
            if (mark == _ITERATOR or mark != self._start.get(name)) and (text := _digest(value, held)) is not None:
                is_array = issubclass(type(value), (torch.Tensor, np.ndarray))
                carries = issubclass(type(value), float) or (is_array and value.shape[:1] != (samples,))
                yield name, text, carries and name in self._start

    def differing(self, before: dict[str, str]) -> list[str]:
        """Returns the names of variables that have another value than in these digests of a checkpoint."""
        held = _held(self._state)
        now = [(name, value, _digest(value, held)) for name, value, _ in self._marks(held) if name in before]
        return [
            name
            for name, value, text in now
            if text is not None and (text != before[name] or text == _ITERATOR) and not _is_running(value)
        ]

    def moving(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each generator that has drawn, and of each tensor, or object of tensors, that has changed in
        place since the start. Of single tensors only the first: a tensor that accumulates may be set to zero before it is read."""
        has_tensor = False
        for name, value, mark in self._marks(_held(self._state)):
            is_tensor = issubclass(type(value), torch.Tensor)
            if _has_moved(self._start.get(name), mark) and not (is_tensor and has_tensor):
                has_tensor |= is_tensor
                yield name, value

    def _marks(self, held: set[int | None]) -> list[tuple[str, Any, Any]]:
        """Returns (name, value, mark) of each value that no checkpoint holds. Two marks are equal if the value has not changed.

        Args:
            held: the tensors and generators that a checkpoint holds (`_held`).
        """
        marks: dict[str, tuple[Any, Any]] = {}
        for name, value, is_own in reached(self._state):
            is_item = name[-1] == "]"  # it belongs to its list or dictionary, which is compared as a whole
            by_itself = issubclass(type(value), (torch.Tensor, nn.Module)) or generators.is_generator(value)
            if name not in marks and (is_own or (by_itself and not is_item)):
                with contextlib.suppress(Exception):  # an object of the script may raise anything
                    if (mark := _print(value, held, _mark)) is not None:
                        marks[name] = value, mark
        return [(name, value, mark) for name, (value, mark) in marks.items()]


def tables(state: TrainState | None = None) -> dict[str, str]:
    """Returns name → shape and digest of each tensor, array, module and long list of whole numbers that the script's variables lead to,
    without those that a checkpoint holds. State None: there is no model yet."""
    held, digests = set[int | None]() if state is None else _held(state), dict[str, str]()
    for name, value, _ in reached(state):
        with contextlib.suppress(Exception):  # an object of the script may raise anything
            is_module = issubclass(type(value), nn.Module)
            if (is_module or is_table(value)) and (plain := _print(value, held, beginning)) is not None:
                shape = "" if is_module else getattr(value, "shape", f"{LIST} of {len(value)}")
                digests.setdefault(name, f"{shape}:{zlib.crc32(repr(plain).encode())}")
    return digests


def is_table(value: Any) -> bool:
    """Returns whether the value is a tensor or array of several numbers, or a list of more than `SHORT` whole numbers."""
    if issubclass(type(value), torch.Tensor):
        return bool(value.numel() > 1)
    if issubclass(type(value), np.ndarray):
        return bool(value.size > 1 and not value.dtype.hasobject)
    if not issubclass(type(value), (list, tuple)) or len(value) <= SHORT:
        return False
    return all(type(item) is int or isinstance(item, np.integer) for item in value[:ITEMS])


def reached(state: TrainState | None) -> list[Reached]:
    """Returns the values of the running functions' variables, with the attributes and items below them. Leaves out the content of kept
    objects, since a state may consist of copies, and the generators of the process. Returns nothing if an object of the script raises,
    since all this only serves warnings."""
    named = ((name, value) for names in _frames() for name, value in names.items() if name[:2] != "__")
    optimizers = {} if state is None else state.optimizers
    of_optimizers = (
        (f"{name}.{key}", value)
        for name, optimizer in optimizers.items()
        for key, value in (vars(optimizer).items() if is_of_script(root_of(optimizer)) else ())
        if key[0] != "_" and key not in _OF_OPTIMIZER
    )
    with contextlib.suppress(Exception):  # a property, or a subclass of a tensor or a dictionary, may raise anything
        return list(_below([*named, *of_optimizers], [] if state is None else _known(state)))
    return []


def _known(state: TrainState) -> list[Any]:
    """Returns the values that a checkpoint restores."""
    kept = state.user_state
    things = [*state.optimizers.items(), *kept.objects.items(), *kept.rank_objects.items()]
    inside = [
        (name, [thing.state, thing.param_groups] if isinstance(thing, torch.optim.Optimizer) else thing)
        for name, thing in things
        if not isinstance(thing, torch.optim.lr_scheduler.LRScheduler)  # it has an optimizer that need not be kept
    ]
    known = [*kept.generators.values(), *generators.of_process(state.world.device).values()]
    return known + [value for _, value, _ in _below(inside, [])]


def code_of(function: Any) -> types.CodeType | None:
    """Returns the code of a function, also of one that is bound, partial or wrapped; None: a callable object may raise anything."""
    while type(function) in (functools.partial, types.MethodType):
        function = function.func if type(function) is functools.partial else function.__func__
    with contextlib.suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function) if type(function) is types.FunctionType else None
    return function.__code__ if type(function) is types.FunctionType else None


def reads(code: types.CodeType | None, name: str) -> bool:
    """Returns whether the code reads a variable, or the attribute of one, and assigns no part of it."""
    steps = [one for inner in codes_of(code) for one in dis.get_instructions(inner)] if code is not None else []
    stored = {one.argval for one in steps if one.opname.startswith("STORE_")}
    read = {one.argval for one in steps if one.opname.startswith("LOAD_")} - stored
    return {*re.sub(r"\[.*?\]", "", name).split(".")} <= read


def counting() -> str | None:
    """Returns the name of the iterator of Python through which the script goes over the running generators, such as `enumerate`, also
    with a progress bar between them; None: it goes over them directly."""
    iterators = (thing for thing in gc.get_objects() if type(thing) in _COUNTING)
    return next((type(iterator).__name__ for iterator in iterators if _is_running(iterator)), None)


def _is_running(iterator: Any) -> bool:
    """Returns whether an iterator is a running generator, or takes its items from one: the loop under way resumes."""
    return any(generator.gi_running for generator in _generators(iterator))


def _has_ended(iterator: Any) -> bool:
    """Returns whether an iterator is a generator that has ended, or takes its items from one, such as the parameters of an optimizer."""
    return any(generator.gi_frame is None for generator in _generators(iterator))


def _generators(iterator: Any) -> list[types.GeneratorType[Any, Any, Any]]:
    inner = [iterator, *gc.get_referents(iterator)]
    inner += [item for held in inner if type(held) is tuple for item in held]  # of zip and map
    return [item for item in inner if type(item) is types.GeneratorType]


def _frames() -> Iterator[dict[str, Any]]:
    """Yields the variables of the running functions, innermost first, without ours."""
    frame = sys._getframe().f_back
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("lockstep."):
            yield {**frame.f_locals}
            yield {**frame.f_globals}
        frame = frame.f_back


def _below(named: Iterable[tuple[str, Any]], known: list[Any]) -> Iterator[Reached]:
    """Yields these values, and the attributes and items below them, without the known ones."""
    waiting = deque((name, value, 0, True) for name, value in named)
    seen: dict[int, Any] = {id(value): value for value in known}
    while waiting and len(seen) < MOST:
        name, value, depth, is_own = waiting.popleft()
        kind = type(value)
        if issubclass(kind, (*_PLAIN, float, torch.Tensor)):
            if is_own or issubclass(kind, torch.Tensor):
                yield Reached(name, value, is_own)
            continue
        of_script = is_of_script(root_of(value))
        if id(value) in seen or kind.__module__.startswith("lockstep."):
            continue
        if issubclass(kind, (types.ModuleType, type)) and not of_script:
            continue
        seen[id(value)] = value
        yield Reached(name, value, is_own)
        # A module without parameters may be a loss function with settings.
        is_closed = issubclass(kind, nn.Module) and not (of_script and _has_no_parameter(value))
        if depth < DEPTH and not is_closed and not issubclass(kind, torch.optim.Optimizer):
            names = of_script and not issubclass(kind, (dict, list, tuple))
            waiting.extend((inner, item, depth + 1, names) for inner, item in _inside(name, value))


def _has_no_parameter(module: nn.Module) -> bool:
    return "_parameters" in vars(module) and next(module.parameters(), None) is None


def _inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the items or attributes of a value, or what a function is bound to, with their names."""
    if issubclass(type(value), types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())  # a cell may be empty
        bound = [(free, item) for free, cell in cells for item in gc.get_referents(cell)]
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = zip(reversed(names), reversed(value.__defaults__ or ()))
        return [(f"{name}.{inner}", item) for inner, item in (*bound, *defaults, *vars(value).items())]
    if issubclass(type(value), functools.partial):
        return [(f"{name}.func", value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
    if issubclass(type(value), dict):
        some = itertools.islice(dict.items(value), ITEMS)
        return [(f"{name}[{key!r}]", item) for key, item in some if type(key) in (str, int)]
    if issubclass(type(value), (list, tuple)):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value[:ITEMS])]
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
    return [(f"{name}.{key}", item) for key, item in attributes.items() if key[:2] != "__" and key not in of_torch]


def _held(state: TrainState) -> set[int | None]:
    """Returns the memory of the tensors that a checkpoint holds, and the identities of its generators."""
    kept = state.user_state
    average = [] if state.ema is None else [*state.ema.average.parameters()]
    ours = [*state.model.parameters(), *average, *state.model.buffers(), *state.sync.gradients()]
    states = [stateful.state_dict() for stateful in (*kept.objects.values(), *kept.rank_objects.values())]
    return storages([ours, states, dict(kept.values)]) | {id(generator) for generator in kept.generators.values()}


def _print(value: Any, held: set[int | None], leaf: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """Returns plain values that stay equal as long as this value does; None: values of this kind are not compared.

    Args:
        held: the tensors and generators that a checkpoint holds (`_held`).
        leaf: prints a tensor or a generator.
        depth: levels of lists and dictionaries to read.
    """
    kind = type(value)
    if issubclass(kind, (str, bytes)):
        return [len(value), repr(value[:1000])]
    if issubclass(kind, _PLAIN):
        return repr(value)[:1000]
    if issubclass(kind, (float, np.generic)):
        return None if _is_time(value) else repr(value)
    if issubclass(kind, torch.Tensor):
        # Such as a loss; or a parameter, of which `trained_outside` warns.
        is_result = value.requires_grad and depth == DEPTH
        return None if is_result or not _is_compared(value, held) else leaf(value)
    if issubclass(kind, np.ndarray):
        if value.dtype.hasobject or _is_mapped(value):
            return None
        return [value.shape, zlib.crc32(value.flat[:: _stride(value.size)].tobytes())]
    if generators.is_generator(value):
        return None if id(value) in held else leaf(value)
    if issubclass(kind, nn.Module):
        is_constructed = "_modules" in vars(value)
        tensors = [*value.parameters(), *value.buffers()] if is_constructed else []
        return [leaf(tensor) for tensor in tensors if _is_compared(tensor, held)] or None
    if hasattr(kind, "__next__"):
        return None if issubclass(kind, io.IOBase) or _has_ended(value) else _position(value)
    if not depth or not issubclass(kind, (dict, set, frozenset, *_SEQUENCES)):
        return None
    count, most = len(value), ITEMS // 10 ** (DEPTH - depth)  # fewer of each inner one
    if issubclass(kind, (set, frozenset)):  # in no order
        return [count, sorted(map(repr, value)) if count <= 2 * most else None]
    items = dict.items(value) if issubclass(kind, dict) else value
    some = [*items] if count <= 2 * most else [*itertools.islice(items, most), *itertools.islice(reversed(items), most)]
    return [count, [_print(item, held, leaf, depth - 1) for item in some]]


def _is_mapped(array: np.ndarray) -> bool:
    """Returns whether an array is a file: to read samples of it could take as long as to read it whole."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return isinstance(array, np.memmap) or isinstance(array.base, mmap.mmap)


def _position(iterator: Any) -> Any:
    """Returns a number or text that differs after each item of the iterator, or `_ITERATOR` if it does not show its position."""
    if type(iterator) is itertools.count:
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return _ITERATOR if left < 0 else left


def _is_compared(tensor: torch.Tensor, held: set[int | None]) -> bool:
    return storage(tensor) not in held and has_bytes(tensor.detach()) and not tensor.is_inference()


def _stride(size: int) -> int:
    return max(1, size // _SAMPLE)


def _is_time(value: Any) -> bool:
    """Returns whether a number is a reading of a clock in this process."""
    now = time.time(), time.perf_counter(), time.monotonic()
    return any(began <= value <= end for began, end in zip(_BEGAN, now))


def _mark(value: Any) -> Mark:
    if issubclass(type(value), torch.Tensor):
        return Mark(WeakIdRef(value), value._version)
    seed = value.initial_seed() if isinstance(value, torch.Generator) else None
    return Mark((id(value), seed), generators.comparable(generators.state_of(value)))


def beginning(value: Any) -> Any:
    """Returns the first numbers of each dimension of a tensor: to read all of one that is a file would take long."""
    if not isinstance(value, torch.Tensor):
        return None  # a generator, which `moving` names
    each = max(2, round(_SAMPLE ** (1 / max(1, value.ndim))))
    return [[*value.shape], _contents(value[(slice(each),) * value.ndim])]


@torch.no_grad()
def _contents(value: Any) -> Any:
    if issubclass(type(value), torch.Tensor):
        sample = value.detach().reshape(-1)[:: _stride(value.numel())]
        return [str(value.dtype), [*value.shape], sums_of_bits([sample]).tolist()]
    return generators.comparable(generators.state_of(value))


def _digest(value: Any, held: set[int | None]) -> str | None:
    plain = None
    with contextlib.suppress(Exception):  # an object of the script may raise anything
        plain = _print(value, held, _contents)
    return plain if plain in (None, _ITERATOR) else str(zlib.crc32(repr(plain).encode()))


def _has_moved(before: Any, now: Any) -> bool:
    """Returns whether a tensor in these marks has changed in place, or a generator has drawn."""
    if isinstance(before, Mark) and isinstance(now, Mark):
        return bool(before.made == now.made and before.state != now.state)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return any(map(_has_moved, before, now))
    return False
