"""The variables of a script: their values at a save, and in the start that resumes from it.

A checkpoint holds a digest of each variable that has changed since the start: of a counter, a list, an average, a copy of the weights. The
start that resumes names those that have another value there. A variable that the loop itself makes, such as a batch, does not exist yet
where a start resumes, so it is not named. What a script draws before its session without a seed is another thing in each process: the
ranks, and the starts, compare it (`tables`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import inspect
import io
import itertools
import math
import mmap
import operator
import os
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

from .. import generators
from ..checkpoint.state import TrainState
from ..parallel.packing import storage, storages, tensor_bytes
from .bytecode import (
    PLAIN,
    Kind,
    code_of,
    kind_of,
    reads,
    returns,
    running,
    set_anew,
    spaces,
    stored,
)
from .contents import DEPTH, ITEMS, SEQUENCES, VALUES, Reached, Same, built, in_models, reached
from .proof import has_bytes
from .undo import codes_of, is_of_script, root_of

LIST = "list"
"""The beginning of the shape of a list in `tables`."""
SHORT = 16
"""A list of at most so many whole numbers is no table: ranks may have different ones, such as their experts or groups."""
_SAMPLE = 1 << 16
"""Numbers of a tensor or an array that a digest reads, evenly spaced, or the first ones of each dimension (`beginning`)."""
_LONG = 1 << 12
"""Plain values of a long list, set or dictionary that a digest reads, evenly spaced, besides the first and last ones."""
_BYTES = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, io.BytesIO)
_COUNTING = (enumerate, zip, map, itertools.islice)
_NO_OBJECTS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
KIND = "kind "
"""The beginning of the digest of something that has no state: a function, a class, or a module without numbers."""
CHOICE = f"{KIND}of "
"""The beginning of the digest of an object that has several names: the first of these follows (`Variables._choices`)."""
_OBJECT = " (object)"
"""The end of the name under which the choice of an object is compared: beside its kind."""
_ITERATOR = "an iterator"
"""The digest of any iterator, whose position cannot be seen. It begins anew in each start."""
_BEGAN = time.time(), time.perf_counter(), time.monotonic()

Marks = dict[str, tuple[Any, Any]]
"""Name → (value, mark)."""


class Mark(NamedTuple):
    """A tensor or a generator at one moment. A mark keeps no tensor alive."""

    made: Any
    """The tensor, weakly; or the generator and its seed. Another value: it was made, or seeded, anew."""
    state: Any
    """The number of changes in place and a few numbers, since changes of `tensor.data` are not counted; or the state of the generator."""


class Variables:
    """The variables of the script in one attempt, on one rank."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._kinds = dict[str, type[Any]]()
        """Name → class of the object, such as a loss function."""
        self._functions = set[types.CodeType]()
        """The functions that run where a loop begins. Variables of others, such as an evaluation, last for one call."""
        self._bound: set[tuple[str, int]] | None = None
        """(name, identity) of the script's variables where the loop begins."""
        self._names: list[str] = []
        """The names of the script's values where the loop begins, in their order (`begin`)."""
        self._start = {name: mark for name, (_, mark) in self._marks(*self._now()).items()}
        self._loop = dict[str, Any]()
        """Marks of the values where the loop begins."""
        self._in_models = dict[str, Any]()
        """Marks of attributes of models and optimizers after the first step (`note_models`)."""

    def begin(self) -> None:
        """Notes the functions where a loop begins, and, once, which names the script's objects have there."""
        self._functions |= {frame.f_code for frame in running()}
        if self._bound is None:
            self._bound = {(name, id(value)) for space in spaces(self._functions) for name, value in space.items()}
            self._names = list(dict.fromkeys(one.name for one in reached(self._state, self._functions) if one.is_own))
            self._loop = {name: mark for name, (_, mark) in self._marks(*self._now()).items()}
            self._start |= {name: mark for name, mark in self._loop.items() if name.endswith(_OBJECT)}

    def note_models(self) -> None:
        """Notes the attributes of models and optimizers. A first pass may set some, such as a table of positions."""
        self._in_models = {name: mark for name, (_, mark) in self._model_marks(*self._now()).items()}

    def changed(self, samples: int, batch: Any) -> Iterator[tuple[str, str, bool]]:
        """Yields (name, digest, whether ranks must agree on the value) of each iterator, and of each variable that has changed since the
        start of the attempt. Ranks must agree on a number, tensor, array, list or dictionary from before the loop that is no batch, if the
        function of a step reads it (`is_read`).

        Args:
            samples: as many entries as a tensor of the rank's last batch has.
            batch: the batch that the loop has just given to the script, whose variables last for one batch.
        """
        held, things = self._now()
        for name, (value, mark) in self._model_marks(held, things).items():
            if mark != self._in_models.get(name, mark) and (text := _digest(value, held)) is not None:
                yield name, text, False
        given = {id(leaf) for leaf in tree_leaves(batch) if not issubclass(type(leaf), (*PLAIN, float))}
        for name, (value, mark) in self._marks(held, things).items():
            has_changed = id(value) not in given and (mark == _ITERATOR or mark != self._start.get(name))
            if has_changed and (text := _digest(value, held)) is not None:
                carries = issubclass(type(value), (int, float)) or not _is_batch(value, samples)
                yield name, text, carries and name in self._loop

    def sets(self, name: str) -> bool:
        """Returns whether a function that has begun a loop sets this variable."""
        return any(name in stored(code) for code in self._functions)

    def is_read(self, code: types.CodeType | None, name: str) -> bool:
        """Returns whether the function of a step reads a variable: by its name, as a method of the object that has it, or through another
        method that returns a value."""
        holder, _, attribute = name.rpartition(".")
        kind = self._kinds.get(holder)
        if code is None or kind is None or not is_of_script(root_of(kind)):
            return code is not None and reads(code, name, issubclass(self._kinds.get(name, float), (list, tuple, dict)))
        methods = {key: code_of(function) for key, function in vars(kind).items()}
        names = {key for inner in codes_of(code) for key in inner.co_names} | {"__call__", "forward"}
        called = [one for key, one in methods.items() if key in names and one is not None and returns(one)]
        through = reads(code, holder, uses=True) and any(reads(one, f".{attribute}") for one in called)
        return through or reads(code, name) or (code in methods.values() and reads(code, f".{attribute}"))

    def differing(self, before: dict[str, str], sort: str = "") -> list[str]:
        """Returns the names of variables that have another value than in these digests of a checkpoint, or a kept object in place of it,
        and of attributes that objects do not have yet.

        Args:
            sort: `KIND`: compares those that were functions, classes, modules without numbers, or hooks; `CHOICE`: objects with several
                names; "": the others.
        """
        kinds_before = {name for name, text in before.items() if text.startswith(KIND)}
        before = {name: text for name, text in before.items() if _sort_of(text) == sort}
        if not before:
            return []
        held, things = self._now()
        marks = self._marks(held, things) | self._model_marks(held, things)
        now = {name: (value, _digest(value, held)) for name, (value, _) in marks.items() if name in before}
        others = [
            name
            for name, (value, text) in now.items()
            if text is not None and (text != before[name] or text == _ITERATOR) and not _is_running(value)
        ]
        missing = [name for name in before if name not in now and self._is_missing(name, kinds_before)]
        kept = self._state.user_state
        restored = {id(one) for one in (*kept.objects.values(), *kept.rank_objects.values())}
        # The script has given the name to another object, and the checkpoint has the first.
        named = [name for name, value, *_ in things if type(value) is Same and value.of in restored and name in before]
        return list(dict.fromkeys(name.removesuffix(_OBJECT) for name in [*others, *missing, *named]))

    def _is_missing(self, name: str, of_another: set[str]) -> bool:
        """Returns whether a name is an attribute that an object lacks here, and that lasts for more than one call.

        Args:
            of_another: names of functions and modules, which are compared by themselves.
        """
        holder, _, attribute = name.rpartition(".")
        kind: Any = None if holder in of_another else self._kinds.get(holder)
        with contextlib.suppress(TypeError):  # the class has no hash, or there is no object
            return not issubclass(kind, _NO_OBJECTS) and attribute not in set_anew(kind)
        return False

    def moving(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each generator that has drawn, and of each tensor, or object of tensors, that has changed in
        place since the loop began. Of single tensors only the first: a tensor that accumulates may be set to zero before it is read."""
        has_tensor = False
        for name, (value, mark) in self._marks(*self._now()).items():
            is_tensor = issubclass(type(value), torch.Tensor)
            if _has_moved(self._loop.get(name), mark) and not (is_tensor and has_tensor):
                has_tensor |= is_tensor
                yield name, value

    def _now(self) -> tuple[set[int | None], list[Reached]]:
        """Returns the tensors and generators that a checkpoint holds (`_held`), and the script's values."""
        return _held(self._state), reached(self._state, self._functions, self._bound)

    def _marks(self, held: set[int | None], things: list[Reached]) -> Marks:
        """Returns the marks of those values that no checkpoint holds. Two marks are equal if the value has not changed."""
        with contextlib.suppress(Exception):  # as in `reached`
            things = [*things, *built(self._state)]
        self._kinds = {name: type(value) for name, value, *_ in things if type(value) is not Same}
        return _marked(things, held) | self._choices(things)

    def _model_marks(self, held: set[int | None], things: list[Reached]) -> Marks:
        """Returns the marks of the state in plain attributes of models, optimizers and kept objects."""
        with contextlib.suppress(Exception):  # as in `reached`
            return _marked(in_models(self._state, things), held)
        return {}

    def _choices(self, things: list[Reached]) -> Marks:
        """Returns name and `_OBJECT` → (first name, mark) of each object that has several of the names in `_names`: a script may choose
        one of its objects. An object is left out if a name leads to it and to others, in several functions."""
        shared = {value.of for _, value, *_ in things if type(value) is Same}
        objects: dict[str, set[int]] = {}
        for name, value, is_own, _ in things:
            if is_own and not issubclass(type(value), VALUES):
                objects.setdefault(name, set()).add(value.of if type(value) is Same else id(value))
        unclear = {identity for identities in objects.values() if len(identities) > 1 for identity in identities}
        of = {name: min(objects[name]) for name in self._names if objects.get(name, unclear) & shared - unclear}
        first = {identity: name for name, identity in reversed(of.items())}
        same = {name: Same(identity, first[identity]) for name, identity in of.items() if first[identity] != name}
        return {f"{name}{_OBJECT}": (one, one.name) for name, one in same.items()}


def _marked(things: Iterable[Reached], held: set[int | None]) -> Marks:
    """Returns the marks of the values that are compared by themselves, and that no checkpoint holds."""
    marks: Marks = {}
    for name, value, is_own, is_part in things:
        kind = type(value)
        by_itself = issubclass(kind, (torch.Tensor, np.ndarray, nn.Module, *_BYTES)) or generators.is_generator(value)
        if issubclass(kind, io.IOBase) and not name.isidentifier():
            continue  # a dataset may look for each sample in its file
        if name not in marks and (is_own or (_is_iterator(kind) if is_part else by_itself)):
            with contextlib.suppress(Exception):  # an object of the script may raise anything
                if (mark := _print(value, held, _mark)) is not None:
                    marks[name] = value, mark
    return marks


def _is_batch(value: Any, samples: int) -> bool:
    """Returns whether a tensor, an array, a list or a dictionary has an entry a sample, or holds such values, or results with a gradient.
    True of any other value."""
    if issubclass(type(value), (torch.Tensor, np.ndarray)):
        return value.shape[:1] == (samples,) or getattr(value, "requires_grad", False)
    if not issubclass(type(value), (list, tuple, dict)) or len(value) == samples:
        return True
    items = [*dict.values(value)] if issubclass(type(value), dict) else value
    return any(not issubclass(type(item), (*PLAIN, float)) and _is_batch(item, samples) for item in items[:ITEMS])


def tables(state: TrainState | None = None) -> dict[str, str]:
    """Returns name → shape and digest of each tensor, array, module and long list of whole numbers that the script's variables lead to,
    without those that a checkpoint holds. State None: there is no model yet."""
    held, digests = set[int | None]() if state is None else _held(state), dict[str, str]()
    for name, value, *_ in reached(state):
        with contextlib.suppress(Exception):  # an object of the script may raise anything
            is_module = issubclass(type(value), nn.Module) and kind_of(value) is None
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


def counting() -> str | None:
    """Returns the name of the iterator of Python through which the script goes over the running generators, such as `enumerate`, also
    with a progress bar between them; None: it goes over them directly."""
    iterators = (thing for thing in gc.get_objects() if type(thing) in _COUNTING)
    return next((type(iterator).__name__ for iterator in iterators if _is_running(iterator)), None)


def _is_running(iterator: Any) -> bool:
    """Returns whether an iterator is a running generator, or takes its items from one: the loop under way resumes."""
    return any(generator.gi_running for generator in _generators(iterator))


def _generators(iterator: Any) -> list[types.GeneratorType[Any, Any, Any]]:
    """Returns the generators from which an iterator takes its items, or itself, if it is one."""
    inner = [iterator, *gc.get_referents(iterator)]
    inner += [item for held in inner if type(held) is tuple for item in held]  # of zip and map
    return [item for item in inner if type(item) is types.GeneratorType]


def _is_iterator(kind: type[Any]) -> bool:
    return hasattr(kind, "__next__") or hasattr(kind, "__anext__")


def _held(state: TrainState) -> set[int | None]:
    """Returns the memory of the tensors that a checkpoint holds, and the identities of its generators."""
    kept = state.user_state
    parameters = [[*model.parameters()] for model in state.models]
    ours = [parameters, [*state.model.buffers()], state.sync.gradients()]
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
    if (about := value if kind is Kind else kind_of(value)) is not None:
        return Kind(f"{KIND}{about}")
    if issubclass(kind, (str, bytes)):
        return [len(value), repr(value[:1000])]
    if issubclass(kind, PLAIN):
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
        # `flat` is slow, and does not copy a large array.
        flat: Any = value.reshape(-1) if value.flags.c_contiguous or value.size < 4 * _SAMPLE else value.flat
        return [value.shape, zlib.crc32(flat[:: _stride(value.size)].tobytes())]
    if generators.is_generator(value):
        return None if id(value) in held else leaf(value)
    if issubclass(kind, np.random.SeedSequence):
        return repr(value.state)
    if issubclass(kind, nn.Module):
        is_constructed = "_modules" in vars(value)
        tensors = [*value.parameters(), *value.buffers()] if is_constructed else []
        return [leaf(tensor) for tensor in tensors if _is_compared(tensor, held)] or None
    if issubclass(kind, _BYTES):
        buffer = np.frombuffer(value.getbuffer() if isinstance(value, io.BytesIO) else value, np.uint8)
        return [kind.__name__, zlib.crc32(buffer[:: _stride(buffer.size)].tobytes())]
    if _is_iterator(kind):
        if issubclass(kind, io.IOBase):  # what a script writes is no state
            return _position_in(value) if value.readable() and not value.writable() else None
        # One that has ended is no state, such as the parameters of an optimizer.
        return None if any(one.gi_frame is None for one in _generators(value)) else _position(value)
    if not depth or not issubclass(kind, (dict, set, frozenset, *SEQUENCES)):
        return None
    count, most = len(value), max(1, ITEMS // 10 ** (DEPTH - depth))  # fewer of each inner one
    is_long = count > 2 * most
    if issubclass(kind, (set, frozenset)):  # in no order
        is_read = not is_long or (count <= _LONG and all(type(item) in (*PLAIN, float) for item in value))
        return [count, sorted(map(repr, value)) if is_read else None]
    items = dict.items(value) if issubclass(kind, dict) else value
    some = [*itertools.islice(items, most), *itertools.islice(reversed(items), most)] if is_long else [*items]
    parts = [*itertools.chain.from_iterable(some)] if issubclass(kind, dict) else some
    if is_long and depth == DEPTH:
        values = dict.values(value) if issubclass(kind, dict) else value
        spaced = itertools.islice(values, 0, None, _stride(count, _LONG))
        parts += [item for item in spaced if type(item) in (*PLAIN, float)]
    return [count, [_print(part, held, leaf, depth - 1) for part in parts]]


def _is_mapped(array: np.ndarray) -> bool:
    """Returns whether an array is a file: to read samples of it could take as long as to read it whole."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return isinstance(array, np.memmap) or isinstance(array.base, mmap.mmap)


def _position(iterator: Any) -> Any:
    """Returns a number or text that differs after each item of the iterator, or `_ITERATOR` if it does not show its position."""
    if type(iterator) is itertools.count:
        return repr(iterator)
    if type(iterator) is types.GeneratorType and inspect.getgeneratorstate(iterator) == inspect.GEN_CREATED:
        return 0
    left = getattr(iterator, "_num_yielded", None)  # of torch's loaders, whose length hint is their whole length
    left = operator.length_hint(iterator, -1) if left is None else left
    return _ITERATOR if left < 0 else left


def _position_in(file: Any) -> int:
    with contextlib.suppress(OSError):
        return int(file.tell())
    return os.lseek(file.fileno(), 0, os.SEEK_CUR)  # about: a loop over the lines of a text reads ahead


def _is_compared(tensor: torch.Tensor, held: set[int | None]) -> bool:
    return storage(tensor) not in held and has_bytes(tensor.detach()) and not tensor.is_inference()


def _stride(size: int, sample: int = _SAMPLE) -> int:
    """Returns the distance between values of a sample. It has no common factor with the size, so that the sample meets every column of a
    table."""
    return next(step for step in itertools.count(max(1, size // sample)) if math.gcd(step, size) == 1)


def _is_time(value: Any) -> bool:
    """Returns whether a number is a reading of a clock in this process."""
    now = time.time(), time.perf_counter(), time.monotonic()
    return any(began <= value <= end for began, end in zip(_BEGAN, now))


def _mark(value: Any) -> Mark:
    if issubclass(type(value), torch.Tensor):
        steps = [max(1, size // 2) for size in value.shape[:4]]
        some, few = (*(slice(None, None, step) for step in steps), *[0] * (value.ndim - 4)), ""
        with contextlib.suppress(RuntimeError):  # Python has no such numbers
            few = repr(value.detach()[some].tolist())
        return Mark(WeakIdRef(value), (value._version, few))
    seed = value.initial_seed() if isinstance(value, torch.Generator) else None
    return Mark((id(value), seed), generators.comparable_state(value))


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
        return [str(value.dtype), [*value.shape], zlib.crc32(tensor_bytes(sample).numpy().tobytes())]
    return generators.comparable_state(value)


def _digest(value: Any, held: set[int | None]) -> str | None:
    if type(value) is Same:
        return f"{CHOICE}{value.name}"
    plain = None
    with contextlib.suppress(Exception):  # an object of the script may raise anything
        plain = _print(value, held, _contents)
    if plain in (None, _ITERATOR):
        return plain
    return (KIND if type(plain) is Kind else "") + str(zlib.crc32(repr(plain).encode()))


def _sort_of(text: str) -> str:
    return next((sort for sort in (CHOICE, KIND) if text.startswith(sort)), "")


def _has_moved(before: Any, now: Any) -> bool:
    """Returns whether a tensor in these marks has changed in place, or a generator has drawn."""
    if isinstance(before, Mark) and isinstance(now, Mark):
        return bool(before.made == now.made and before.state != now.state)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return any(map(_has_moved, before, now))
    return False
